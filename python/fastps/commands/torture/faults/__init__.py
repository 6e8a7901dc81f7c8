"""What is done to servers and to the way to them."""
