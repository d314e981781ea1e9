"""OpenAI's HTTP interface: what comes in, what goes out, and how answers become the one or other."""
