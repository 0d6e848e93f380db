-- Machines: settings, identity and the state that the daemon saw last. Times are milliseconds since 1970 UTC.
CREATE TABLE machines (
    uuid                 TEXT    NOT NULL PRIMARY KEY,
    name                 TEXT    NOT NULL UNIQUE,
    mac                  TEXT    NOT NULL UNIQUE,
    image                TEXT    NOT NULL,
    cache_mode           TEXT    NOT NULL,
    cache_ram_bytes      INTEGER NOT NULL,
    cache_disk_bytes     INTEGER NOT NULL,
    memory_bytes         INTEGER NOT NULL,
    cpus                 INTEGER NOT NULL,
    host_name            TEXT    NOT NULL,
    machine_id           TEXT    NOT NULL,
    ssh_host_key_public  TEXT    NOT NULL,
    ssh_host_key_private TEXT    NOT NULL,
    user_data            TEXT,
    wanted               TEXT    NOT NULL,
    state                TEXT    NOT NULL,
    reason               TEXT,
    version              TEXT,
    boot_ms              INTEGER,
    started_at_ms        INTEGER,
    created_at_ms        INTEGER NOT NULL
) STRICT;

-- History: who changed what, and when. Rows are only ever added.
CREATE TABLE events (
    id      INTEGER NOT NULL PRIMARY KEY AUTOINCREMENT,
    at_ms   INTEGER NOT NULL,
    actor   TEXT    NOT NULL,
    subject TEXT    NOT NULL,
    action  TEXT    NOT NULL,
    detail  TEXT    NOT NULL
) STRICT;

CREATE INDEX events_by_subject ON events (subject, id);
