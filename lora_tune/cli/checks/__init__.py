"""What the doctor looks at: small functions that each return findings and change nothing."""
