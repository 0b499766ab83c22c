"""The schema of a node's file, as the migrations that lead to it.

A new file goes through all of them, so that there is one way only to the newest schema.
"""

MIGRATIONS = (
    """
    CREATE TABLE facts (name TEXT PRIMARY KEY, value BLOB NOT NULL) WITHOUT ROWID;
    CREATE TABLE users (
        id INTEGER PRIMARY KEY,
        name TEXT NOT NULL UNIQUE,
        features TEXT NOT NULL DEFAULT '{}',  -- JSON, by name of the feature
        silo INTEGER NOT NULL DEFAULT 0       -- which client holds the user, if any does
    );
    CREATE TABLE interactions (
        id INTEGER PRIMARY KEY AUTOINCREMENT, -- never used again: a run takes part up to one
        user INTEGER NOT NULL REFERENCES users ON DELETE CASCADE,
        item TEXT NOT NULL,
        value REAL NOT NULL,
        time INTEGER NOT NULL,
        context TEXT NOT NULL DEFAULT '{}'
    );
    CREATE INDEX interactions_of ON interactions (user);
    CREATE TABLE runs (
        id TEXT PRIMARY KEY,
        number INTEGER NOT NULL,              -- 1 is the first run of this node
        upto INTEGER NOT NULL,                -- later interactions wait for the next run
        terms TEXT,                           -- digest of the assignment
        round INTEGER NOT NULL DEFAULT 0,     -- last one done
        selected INTEGER NOT NULL DEFAULT 0,  -- round whose private parameters are to be kept
        request TEXT,                         -- digest of the last round's request
        reply BLOB,                           -- and its answer
        version INTEGER NOT NULL DEFAULT 0    -- counts the changes
    ) WITHOUT ROWID;
    CREATE TABLE members (
        run TEXT NOT NULL REFERENCES runs ON DELETE CASCADE,
        place INTEGER NOT NULL,               -- index of the user in the node's enrolment
        user INTEGER NOT NULL REFERENCES users ON DELETE CASCADE,
        client INTEGER NOT NULL,
        PRIMARY KEY (run, place)
    ) WITHOUT ROWID;
    CREATE TABLE private (
        run TEXT NOT NULL REFERENCES runs ON DELETE CASCADE,
        client INTEGER NOT NULL,
        round INTEGER NOT NULL,
        arrays BLOB NOT NULL,
        PRIMARY KEY (run, client, round)
    );
    CREATE TABLE ledger (
        run TEXT NOT NULL,
        user INTEGER NOT NULL REFERENCES users ON DELETE CASCADE,
        uploads INTEGER NOT NULL,
        PRIMARY KEY (run, user)
    ) WITHOUT ROWID;
    """,
    # Parameters that recommend, once a run is finished.
    "ALTER TABLE runs ADD COLUMN model BLOB",
    # Secure sums: the pending sum of a run, and the round whose vector was sent.
    """
    ALTER TABLE runs ADD COLUMN masked INTEGER NOT NULL DEFAULT 0;
    ALTER TABLE runs ADD COLUMN masked_request TEXT;
    ALTER TABLE ledger ADD COLUMN round INTEGER NOT NULL DEFAULT 0;
    CREATE TABLE sums (
        run TEXT PRIMARY KEY REFERENCES runs ON DELETE CASCADE,
        number INTEGER NOT NULL,              -- of the last sum that was begun
        round INTEGER NOT NULL,               -- that is summed, or 0 for an evaluation
        layout TEXT NOT NULL,
        about TEXT NOT NULL,                  -- description of the request
        asked BLOB,                           -- the request, until the vector is sent
        state BLOB NOT NULL,                  -- secrets
        request TEXT NOT NULL,                -- digest of the last request
        reply BLOB                            -- and its answer
    ) WITHOUT ROWID;
    """,
    # Secure sums with one set-up for many, and vectors in pieces.
    """
    DROP TABLE sums;
    CREATE TABLE setups (
        run TEXT PRIMARY KEY REFERENCES runs ON DELETE CASCADE,
        first INTEGER NOT NULL,               -- number of its first sum
        state BLOB NOT NULL,                  -- secrets
        request TEXT NOT NULL,                -- digest of the last request
        reply BLOB NOT NULL                   -- and its answer
    ) WITHOUT ROWID;
    CREATE TABLE sums (
        run TEXT PRIMARY KEY REFERENCES runs ON DELETE CASCADE,
        number INTEGER NOT NULL,              -- of the last sum that was begun
        first INTEGER NOT NULL,               -- number of the first sum of its set-up
        round INTEGER NOT NULL,               -- that is summed, or 0 for an evaluation
        layout TEXT NOT NULL,
        about TEXT NOT NULL,                  -- description of the request
        state BLOB NOT NULL,                  -- secrets
        masked TEXT NOT NULL,                 -- digest of the request for the vector
        request TEXT NOT NULL,                -- digest of the last request
        reply BLOB                            -- and its answer, where it is no vector
    ) WITHOUT ROWID;
    CREATE TABLE pieces (
        run TEXT NOT NULL REFERENCES runs ON DELETE CASCADE,
        number INTEGER NOT NULL,
        words BLOB NOT NULL,                  -- of the unmasked vector, compressed
        PRIMARY KEY (run, number)
    );
    """,
    # A foreign key to a run reads the run's row. Answer and model can be 100 MB, so they are in
    # tables of their own, which only their reader touches.
    """
    CREATE TABLE replies (run TEXT PRIMARY KEY REFERENCES runs ON DELETE CASCADE, reply BLOB);
    CREATE TABLE models (run TEXT PRIMARY KEY REFERENCES runs ON DELETE CASCADE, model BLOB);
    INSERT INTO replies SELECT id, reply FROM runs WHERE reply IS NOT NULL;
    INSERT INTO models SELECT id, model FROM runs WHERE model IS NOT NULL;
    ALTER TABLE runs DROP COLUMN reply;
    ALTER TABLE runs DROP COLUMN model;
    """,
    # Digests of all rows; large values have theirs before them, so that it is read without them.
    """
    ALTER TABLE users ADD COLUMN history INTEGER NOT NULL DEFAULT 0;  -- sum over interactions
    CREATE TABLE seals (
        part TEXT NOT NULL,                   -- table, or 'schema'
        owner TEXT NOT NULL,                  -- run of the rows, or '' for a whole table
        total INTEGER NOT NULL,               -- sum of the rows' digests, modulo 2^64
        PRIMARY KEY (part, owner)
    ) WITHOUT ROWID;
    CREATE TABLE closed (run TEXT PRIMARY KEY) WITHOUT ROWID;  -- runs that are never joined again
    ALTER TABLE private RENAME TO old_private;
    CREATE TABLE private (
        run TEXT NOT NULL REFERENCES runs ON DELETE CASCADE,
        client INTEGER NOT NULL,
        round INTEGER NOT NULL,
        digest BLOB NOT NULL,
        arrays BLOB NOT NULL,
        PRIMARY KEY (run, client, round)
    );
    INSERT INTO private SELECT run, client, round, content_digest(run, client, arrays), arrays
        FROM old_private;
    DROP TABLE old_private;
    ALTER TABLE replies RENAME TO old_replies;
    CREATE TABLE replies (
        run TEXT PRIMARY KEY REFERENCES runs ON DELETE CASCADE,
        digest BLOB NOT NULL,
        reply BLOB NOT NULL
    );
    INSERT INTO replies SELECT run, content_digest(run, reply), reply FROM old_replies;
    DROP TABLE old_replies;
    ALTER TABLE models RENAME TO old_models;
    CREATE TABLE models (
        run TEXT PRIMARY KEY REFERENCES runs ON DELETE CASCADE,
        digest BLOB NOT NULL,
        model BLOB NOT NULL
    );
    INSERT INTO models SELECT run, content_digest(run, model), model FROM old_models;
    DROP TABLE old_models;
    ALTER TABLE pieces RENAME TO old_pieces;
    CREATE TABLE pieces (
        run TEXT NOT NULL REFERENCES runs ON DELETE CASCADE,
        number INTEGER NOT NULL,
        digest BLOB NOT NULL,
        words BLOB NOT NULL,                  -- of the unmasked vector, compressed
        PRIMARY KEY (run, number)
    );
    INSERT INTO pieces SELECT run, number, content_digest(run, number, words), words
        FROM old_pieces;
    DROP TABLE old_pieces;
    """,
)
SEALED_FROM = 6
"""The version of the tables from which on they have seals."""
