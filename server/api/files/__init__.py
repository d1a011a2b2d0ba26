"""Files that clients upload and download, in OpenAI's form."""
