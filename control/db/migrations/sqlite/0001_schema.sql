-- All tables. Times are milliseconds since 1970 UTC; sizes are bytes.

-- Computers that run machines. That of the daemon which owns the database has no certificate; all others are nodes, which
-- connect with one. `generation` grows with each connection, and a node refuses what comes with an older one. `seen_event` is the number
-- of the newest event of the node that is in the history here, and -1 before its first connection. `lease_ms` is the longest lease that
-- the node may have.
CREATE TABLE hosts (
    id           TEXT    NOT NULL PRIMARY KEY,
    name         TEXT    NOT NULL UNIQUE,
    fingerprint  TEXT    UNIQUE,
    state        TEXT    NOT NULL,
    cordoned     INTEGER NOT NULL,
    memory_bytes INTEGER NOT NULL,
    cpus         INTEGER NOT NULL,
    generation   INTEGER NOT NULL,
    seen_event   INTEGER NOT NULL,
    lease_ms     INTEGER NOT NULL,
    joined_at_ms INTEGER NOT NULL,
    seen_at_ms   INTEGER
) STRICT;

-- The authority that signs the certificates of nodes, with its key, both in PEM; the key is encrypted. All controllers of the database have the same one.
CREATE TABLE authorities (
    purpose     TEXT    NOT NULL PRIMARY KEY,
    key         BLOB NOT NULL,
    certificate TEXT    NOT NULL
) STRICT;

-- The key with which the secrets in this database are encrypted is kept elsewhere. `mark` is a known text that was encrypted with it.
CREATE TABLE secrets_keys (
    purpose TEXT    NOT NULL PRIMARY KEY,
    mark    BLOB NOT NULL
) STRICT;

-- Tokens with which nodes join, once. The secret itself is not stored.
CREATE TABLE join_tokens (
    hash          TEXT    NOT NULL PRIMARY KEY,
    created_by    TEXT    NOT NULL,
    created_at_ms INTEGER NOT NULL,
    expires_at_ms INTEGER NOT NULL,
    used_by       TEXT
) STRICT;

-- Resource groups in a cloud, each with the identity with which it is used. `secret` is the client secret; it is encrypted.
-- `owner` is in the tags of all resources there.
CREATE TABLE connections (
    name           TEXT    NOT NULL PRIMARY KEY,
    subscription   TEXT    NOT NULL,
    tenant         TEXT    NOT NULL,
    resource_group TEXT    NOT NULL,
    region         TEXT    NOT NULL,
    owner          TEXT    NOT NULL,
    auth           TEXT    NOT NULL,
    client_id      TEXT,
    secret         BLOB   ,
    authority      TEXT    NOT NULL,
    management     TEXT    NOT NULL,
    created_by     TEXT    NOT NULL,
    created_at_ms  INTEGER NOT NULL
) STRICT;

-- What machines are made alike from: what they boot, and the settings of a machine that is made. `cloud` has, as JSON, how they are created
-- in the cloud of `connection`; without a connection they run on hosts.
CREATE TABLE catalogs (
    name             TEXT    NOT NULL PRIMARY KEY,
    image            TEXT    NOT NULL,
    pin              TEXT,
    scheme           INTEGER NOT NULL,
    keep_ready       INTEGER NOT NULL,
    ready_hours      TEXT,
    stop_idle_s      INTEGER NOT NULL,
    cache_mode       TEXT    NOT NULL,
    cache_ram_bytes  INTEGER NOT NULL,
    cache_disk_bytes INTEGER NOT NULL,
    cache_weight     INTEGER NOT NULL,
    cache_persistent INTEGER NOT NULL,
    transport        TEXT    NOT NULL,
    memory_bytes     INTEGER NOT NULL,
    cpus             INTEGER NOT NULL,
    firmware         TEXT    NOT NULL,
    secure_boot      INTEGER NOT NULL,
    tpm              INTEGER NOT NULL,
    display          TEXT    NOT NULL,
    network          TEXT    NOT NULL,
    scratch_bytes    INTEGER NOT NULL,
    user_data        BLOB,
    name_rule        TEXT    NOT NULL,
    first_number     INTEGER NOT NULL,
    seal_removes     TEXT    NOT NULL,
    on_host_loss     TEXT    NOT NULL,
    connection       TEXT REFERENCES connections (name),
    cloud            TEXT,
    created_at_ms    INTEGER NOT NULL
) STRICT;

-- Versions of the settings of a catalog's machines, its scheme. The settings of the newest version are those of the catalog too.
CREATE TABLE schemes (
    catalog          TEXT    NOT NULL REFERENCES catalogs (name) ON DELETE CASCADE,
    version          INTEGER NOT NULL,
    cache_mode       TEXT    NOT NULL,
    cache_ram_bytes  INTEGER NOT NULL,
    cache_disk_bytes INTEGER NOT NULL,
    cache_weight     INTEGER NOT NULL,
    cache_persistent INTEGER NOT NULL,
    transport        TEXT    NOT NULL,
    memory_bytes     INTEGER NOT NULL,
    cpus             INTEGER NOT NULL,
    firmware         TEXT    NOT NULL,
    secure_boot      INTEGER NOT NULL,
    tpm              INTEGER NOT NULL,
    display          TEXT    NOT NULL,
    network          TEXT    NOT NULL,
    scratch_bytes    INTEGER NOT NULL,
    user_data        BLOB,
    created_by       TEXT    NOT NULL,
    created_at_ms    INTEGER NOT NULL,
    PRIMARY KEY (catalog, version)
) STRICT;

-- Machines: settings, identity and the state that the daemon saw last. `boot` is `vm`, which the daemon starts, or `network`.
-- `name_key` is the name in a form whose bytes have the order in which people count.
-- `pin` is the version that a machine boots whatever its image's channels say, as `IMAGE@NUMBER`. `host` is one of `hosts`, or the nil UUID
-- for a machine in the cloud of `connection`, which no host runs; `cloud` has what it is there, as JSON.
-- `scheme` is the version of the catalog's scheme whose settings a machine has.
-- `kept` is the version below the persistent disk that a machine of another host has there.
-- `address` is its fixed IP address with gateway and DNS servers, and `ip` the address alone.
-- `fenced`: its node ends the machine when the node's lease is over. `to_start`: it was moved from a lost host, and is to be started.
CREATE TABLE machines (
    uuid                 TEXT    NOT NULL PRIMARY KEY,
    name                 TEXT    NOT NULL UNIQUE,
    name_key             TEXT    NOT NULL UNIQUE,
    host                 TEXT    NOT NULL,
    mac                  TEXT    NOT NULL UNIQUE,
    boot                 TEXT    NOT NULL,
    image                TEXT    NOT NULL,
    pin                  TEXT,
    catalog              TEXT    REFERENCES catalogs (name),
    connection           TEXT REFERENCES connections (name),
    cloud                TEXT,
    scheme               INTEGER,
    cache_mode           TEXT    NOT NULL,
    cache_ram_bytes      INTEGER NOT NULL,
    cache_disk_bytes     INTEGER NOT NULL,
    cache_weight         INTEGER NOT NULL,
    cache_persistent     INTEGER NOT NULL,
    transport            TEXT    NOT NULL,
    memory_bytes         INTEGER NOT NULL,
    cpus                 INTEGER NOT NULL,
    firmware             TEXT    NOT NULL,
    secure_boot          INTEGER NOT NULL,
    tpm                  INTEGER NOT NULL,
    display              TEXT    NOT NULL,
    network              TEXT    NOT NULL,
    scratch_bytes        INTEGER NOT NULL,
    host_name            TEXT    NOT NULL,
    machine_id           TEXT    NOT NULL,
    ssh_host_key_public  TEXT    NOT NULL,
    ssh_host_key_private BLOB NOT NULL,
    ip                   TEXT,
    address              TEXT,
    wanted               TEXT    NOT NULL,
    state                TEXT    NOT NULL,
    reason               TEXT,
    version              TEXT,
    kept                 TEXT,
    boot_ms              INTEGER,
    started_at_ms        INTEGER,
    fenced               INTEGER NOT NULL,
    to_start             INTEGER NOT NULL,
    created_at_ms        INTEGER NOT NULL
) STRICT;

CREATE INDEX machines_by_state ON machines (state, name_key);

CREATE INDEX machines_by_host ON machines (host);

CREATE INDEX machines_by_ip ON machines (ip) WHERE ip IS NOT NULL;

CREATE INDEX machines_by_catalog ON machines (catalog) WHERE catalog IS NOT NULL;

-- What a machine boots is its catalog's if it has one.
CREATE VIEW machines_and_catalogs AS
    SELECT machines.*, catalogs.image AS catalog_image, catalogs.pin AS catalog_pin,
        catalogs.on_host_loss AS catalog_on_host_loss, catalogs.scheme AS catalog_scheme
    FROM machines LEFT JOIN catalogs ON catalogs.name = machines.catalog;

-- User data is up to 4 MiB long and seldom read. SQLite reads a row through to its last column, so it has rows of its own.
CREATE TABLE user_data (
    machine TEXT NOT NULL PRIMARY KEY REFERENCES machines (uuid) ON DELETE CASCADE,
    text    BLOB NOT NULL
) STRICT;

-- Personality strings: names and values that guests read.
CREATE TABLE machine_personality (
    machine TEXT NOT NULL REFERENCES machines (uuid) ON DELETE CASCADE,
    name    TEXT NOT NULL,
    value   TEXT NOT NULL,
    PRIMARY KEY (machine, name)
) STRICT;

CREATE TABLE catalog_personality (
    catalog TEXT NOT NULL REFERENCES catalogs (name) ON DELETE CASCADE,
    name    TEXT NOT NULL,
    value   TEXT NOT NULL,
    PRIMARY KEY (catalog, name)
) STRICT;

-- Catalogs whose machines get another SSH host key at a boot if their key is older than this.
CREATE TABLE key_rotations (
    catalog TEXT    NOT NULL PRIMARY KEY REFERENCES catalogs (name) ON DELETE CASCADE,
    after_s INTEGER NOT NULL
) STRICT;

-- When the SSH host key of a machine was made, if it is not the key that the machine was created with.
CREATE TABLE host_keys (
    machine    TEXT    NOT NULL PRIMARY KEY REFERENCES machines (uuid) ON DELETE CASCADE,
    made_at_ms INTEGER NOT NULL
) STRICT;

-- Disks that outlive a machine's runs: that of a machine with a persistent write cache, and that with which a
-- machine edits an image. Each belongs to one version. Once `is_begun` is set, it is an error if its files are gone.
CREATE TABLE persistent_disks (
    id            TEXT    NOT NULL PRIMARY KEY,
    machine       TEXT    NOT NULL REFERENCES machines (uuid),
    purpose       TEXT    NOT NULL CHECK (purpose IN ('persistent', 'edit')),
    image         TEXT    NOT NULL,
    version       INTEGER NOT NULL,
    hash          TEXT    NOT NULL,
    author        TEXT    NOT NULL,
    created_at_ms INTEGER NOT NULL,
    is_begun      INTEGER NOT NULL DEFAULT 0,
    UNIQUE (machine, purpose)
) STRICT;

CREATE UNIQUE INDEX one_edit_for_an_image ON persistent_disks (image) WHERE purpose = 'edit';

-- Machines that are lent to somebody. A row outlives the end of its claim (`ended`) until the machine is off or was reset: a machine
-- with a row is given to nobody.
CREATE TABLE claims (
    machine       TEXT    NOT NULL PRIMARY KEY REFERENCES machines (uuid) ON DELETE CASCADE,
    id            TEXT    NOT NULL UNIQUE,
    holder        TEXT    NOT NULL,
    key           TEXT    UNIQUE,
    claimed_by    TEXT    NOT NULL,
    created_at_ms INTEGER NOT NULL,
    expires_at_ms INTEGER,
    reset_on      TEXT    NOT NULL,
    ended         TEXT
) STRICT;

-- Named tokens of the API. The secret itself is not stored. `scopes` are the catalogs and images that the role is for
-- (`catalog:class-* image:debian`), and NULL if the role is for everything.
CREATE TABLE tokens (
    name          TEXT    NOT NULL PRIMARY KEY,
    hash          TEXT    NOT NULL UNIQUE,
    role          TEXT    NOT NULL,
    scopes        TEXT,
    created_by    TEXT    NOT NULL,
    created_at_ms INTEGER NOT NULL,
    expires_at_ms INTEGER
) STRICT;

-- Sessions of the web console. The secret itself is not stored.
CREATE TABLE sessions (
    hash          TEXT    NOT NULL PRIMARY KEY,
    principal     TEXT    NOT NULL,
    role          TEXT    NOT NULL,
    created_at_ms INTEGER NOT NULL,
    used_at_ms    INTEGER NOT NULL
) STRICT;

-- Work that outlives the client that asked for it. `plan` is what a task needs to go on after a restart of the daemon, as JSON.
CREATE TABLE tasks (
    id            INTEGER NOT NULL PRIMARY KEY AUTOINCREMENT,
    kind          TEXT    NOT NULL,
    subject       TEXT    NOT NULL,
    caller        TEXT    NOT NULL,
    state         TEXT    NOT NULL,
    cancelling    INTEGER NOT NULL DEFAULT 0,
    plan          TEXT,
    progress      TEXT,
    outcome       TEXT,
    created_at_ms INTEGER NOT NULL,
    started_at_ms INTEGER,
    ended_at_ms   INTEGER
) STRICT;

CREATE INDEX tasks_unended ON tasks (id) WHERE ended_at_ms IS NULL;

-- What the write cache of a machine of a catalog took, from a start to its end: for advice on sizes.
CREATE TABLE runs (
    id              INTEGER NOT NULL PRIMARY KEY AUTOINCREMENT,
    catalog         TEXT NOT NULL,
    machine         TEXT NOT NULL,
    began_at_ms     INTEGER NOT NULL,
    ended_at_ms     INTEGER NOT NULL,
    written_bytes   INTEGER NOT NULL,
    spilled_bytes   INTEGER NOT NULL,
    live_peak_bytes INTEGER NOT NULL,
    ram_peak_bytes  INTEGER NOT NULL,
    disk_peak_bytes INTEGER NOT NULL,
    is_limited      INTEGER NOT NULL
) STRICT;

CREATE INDEX runs_by_catalog ON runs (catalog, id);

-- Versions of images in the gallery of a connection. A row is written before the first resource of the version is made, and removed after
-- its last resource was removed.
CREATE TABLE published_images (
    connection    TEXT    NOT NULL REFERENCES connections (name),
    image         TEXT    NOT NULL,
    version       INTEGER NOT NULL,
    hash          TEXT    NOT NULL,
    state         TEXT    NOT NULL,
    generation    INTEGER NOT NULL,
    replicas      INTEGER NOT NULL,
    resource      TEXT    NOT NULL,
    created_by    TEXT    NOT NULL,
    created_at_ms INTEGER NOT NULL,
    PRIMARY KEY (connection, image, version)
) STRICT;

-- Requests to a cloud that were begun and whose end is not known. A row is written before the request is sent. `scope` is the work that sends
-- it, and `operation` the URL of the operation that the cloud has begun.
CREATE TABLE cloud_operations (
    id          INTEGER NOT NULL PRIMARY KEY AUTOINCREMENT,
    connection  TEXT    NOT NULL REFERENCES connections (name) ON DELETE CASCADE,
    scope       TEXT    NOT NULL,
    path        TEXT    NOT NULL,
    verb        TEXT    NOT NULL,
    api_version TEXT    NOT NULL,
    body_hash   TEXT    NOT NULL,
    operation   TEXT,
    UNIQUE (connection, scope, path)
) STRICT;

-- Resources in a cloud that carry our tag and that nothing here needs, and when a sweep saw each first.
CREATE TABLE cloud_orphans (
    connection TEXT    NOT NULL REFERENCES connections (name) ON DELETE CASCADE,
    resource   TEXT    NOT NULL,
    seen_at_ms INTEGER NOT NULL,
    PRIMARY KEY (connection, resource)
) STRICT;

-- History: who changed what, and when. Rows are only ever added.
CREATE TABLE events (
    id      INTEGER NOT NULL PRIMARY KEY AUTOINCREMENT,
    at_ms   INTEGER NOT NULL,
    caller  TEXT    NOT NULL,
    subject TEXT    NOT NULL,
    action  TEXT    NOT NULL,
    detail  TEXT    NOT NULL,
    -- What it changed, as JSON: {"before": {..}, "after": {..}}.
    change  TEXT,
    -- The hash of an event of the audit, of which the next one depends. NULL: the event is not in the audit.
    chain   TEXT
) STRICT;

CREATE INDEX events_by_subject ON events (subject, id);

CREATE INDEX events_of_the_audit ON events (id) WHERE chain IS NOT NULL;
