"""Every configuration of the papers makes a step at full size here, or says why it does not."""
