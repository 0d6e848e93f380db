-- What starts a machine: `vm`, the daemon, or `network`, whoever switches it on.
ALTER TABLE machines ADD COLUMN boot TEXT NOT NULL DEFAULT 'vm';

DROP VIEW machines_and_catalogs;
CREATE VIEW machines_and_catalogs AS
    SELECT machines.*, catalogs.image AS catalog_image, catalogs.pin AS catalog_pin
    FROM machines LEFT JOIN catalogs ON catalogs.name = machines.catalog;
