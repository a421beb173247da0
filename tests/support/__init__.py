"""What tests share: the database server and the conditions some of them need."""
