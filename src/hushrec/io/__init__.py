"""Files and bytes: atomic writes, checked paths, bounded reading, one codec for arrays."""
