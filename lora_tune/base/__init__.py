"""What every room uses: small things that know nothing of trials."""
