"""The progress of workers, the causes of their deaths, and the requests that are to blame."""
