"""The kind `s3`: a bucket of an S3-compatible store."""
