-- Whether a kept disk was opened for writing once: from then on it is an error if its files are gone.
ALTER TABLE persistent_disks ADD COLUMN is_begun INTEGER NOT NULL DEFAULT 0;
