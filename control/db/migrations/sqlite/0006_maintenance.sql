-- Write caches that are kept, their weight in the host's memory, and catalogs.
ALTER TABLE machines ADD COLUMN cache_persistent INTEGER NOT NULL DEFAULT 0;
ALTER TABLE machines ADD COLUMN cache_weight INTEGER NOT NULL DEFAULT 100;
ALTER TABLE machines ADD COLUMN catalog TEXT REFERENCES catalogs (name);

CREATE TABLE catalogs (
    name             TEXT    NOT NULL PRIMARY KEY,
    image            TEXT    NOT NULL,
    pin              TEXT,
    cache_mode       TEXT    NOT NULL,
    cache_ram_bytes  INTEGER NOT NULL,
    cache_disk_bytes INTEGER NOT NULL,
    cache_weight     INTEGER NOT NULL,
    cache_persistent INTEGER NOT NULL,
    transport        TEXT    NOT NULL,
    memory_bytes     INTEGER NOT NULL,
    cpus             INTEGER NOT NULL,
    user_data        TEXT,
    created_at_ms    INTEGER NOT NULL
) STRICT;

-- Disks that outlive a machine's runs: that of a machine with a persistent write cache, and that with which a
-- machine edits an image. Each belongs to one version.
CREATE TABLE persistent_disks (
    id            TEXT    NOT NULL PRIMARY KEY,
    machine       TEXT    NOT NULL REFERENCES machines (uuid),
    purpose       TEXT    NOT NULL CHECK (purpose IN ('persistent', 'edit')),
    image         TEXT    NOT NULL,
    version       INTEGER NOT NULL,
    hash          TEXT    NOT NULL,
    author        TEXT    NOT NULL,
    created_at_ms INTEGER NOT NULL,
    UNIQUE (machine, purpose)
) STRICT;

CREATE UNIQUE INDEX one_edit_for_an_image ON persistent_disks (image) WHERE purpose = 'edit';

-- What a machine boots is its catalog's where it has one.
CREATE VIEW machines_and_catalogs AS
    SELECT machines.*, catalogs.image AS catalog_image, catalogs.pin AS catalog_pin
    FROM machines LEFT JOIN catalogs ON catalogs.name = machines.catalog;
