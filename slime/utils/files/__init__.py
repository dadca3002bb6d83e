"""Files that flags name: rows of data files, and YAML checked against a schema, each problem with its line."""
