"""How fields that several APIs share are written in JSON, and how what is wrong with them is said."""
