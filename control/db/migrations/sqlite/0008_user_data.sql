-- User data is up to 4 MiB long and rarely asked for, and SQLite goes through all of a row to its last columns: it has
-- rows of its own.
CREATE TABLE user_data (
    machine TEXT NOT NULL PRIMARY KEY REFERENCES machines (uuid) ON DELETE CASCADE,
    text    TEXT NOT NULL
) STRICT;

INSERT INTO user_data (machine, text) SELECT uuid, user_data FROM machines WHERE user_data IS NOT NULL;

DROP VIEW machines_and_catalogs;
ALTER TABLE machines DROP COLUMN user_data;
CREATE VIEW machines_and_catalogs AS
    SELECT machines.*, catalogs.image AS catalog_image, catalogs.pin AS catalog_pin
    FROM machines LEFT JOIN catalogs ON catalogs.name = machines.catalog;
