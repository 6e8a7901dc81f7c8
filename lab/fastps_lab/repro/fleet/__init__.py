"""A fleet of uneven machines that come and go, as processes of this machine."""
