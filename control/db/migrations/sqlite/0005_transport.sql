-- How a machine reaches its disk: `vhost-user` or `nbd`.
ALTER TABLE machines ADD COLUMN transport TEXT NOT NULL DEFAULT 'vhost-user';
