"""The daemon and the command line. Never imports the connector."""
