"""What every room uses: small things that know nothing of trials."""

VERSION = "0.1.0"
