"""What tests share: nothing here is installed."""
