"""Read Python files, find names in them, edit their text and write them back."""
