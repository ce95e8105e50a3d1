"""Other libraries' plug-in points. Importing this package imports none of them."""
