"""Parts for hushrec that live in a package of their own."""
