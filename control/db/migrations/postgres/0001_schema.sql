-- All tables. Times are milliseconds since 1970 UTC; sizes are bytes. Texts are ordered by their bytes ("C") as in SQLite, whatever
-- language the server has.

-- Computers that run machines. That of the daemon which owns the database has no certificate; all others are nodes, which
-- connect with one. `generation` grows with each connection, and a node refuses what comes with an older one. `seen_event` is the number
-- of the newest event of the node that is in the history here, and -1 before its first connection. `lease_ms` is the longest lease that
-- the node may have.
CREATE TABLE hosts (
    id           TEXT COLLATE "C" NOT NULL PRIMARY KEY,
    name         TEXT COLLATE "C" NOT NULL UNIQUE,
    fingerprint  TEXT COLLATE "C" UNIQUE,
    state        TEXT    NOT NULL,
    cordoned     BOOLEAN NOT NULL,
    memory_bytes BIGINT  NOT NULL,
    cpus         BIGINT  NOT NULL,
    generation   BIGINT  NOT NULL,
    seen_event   BIGINT  NOT NULL,
    lease_ms     BIGINT  NOT NULL,
    joined_at_ms BIGINT  NOT NULL,
    seen_at_ms   BIGINT
);

-- The authority that signs the certificates of nodes, with its key, both in PEM; the key is encrypted. All controllers of the database have the same one.
CREATE TABLE authorities (
    purpose     TEXT COLLATE "C" NOT NULL PRIMARY KEY,
    key         BYTEA NOT NULL,
    certificate TEXT    NOT NULL
);

-- The key with which the secrets in this database are encrypted is kept elsewhere. `mark` is a known text that was encrypted with it.
CREATE TABLE secrets_keys (
    purpose TEXT COLLATE "C" NOT NULL PRIMARY KEY,
    mark    BYTEA NOT NULL
);

-- Tokens with which nodes join, once. The secret itself is not stored.
CREATE TABLE join_tokens (
    hash          TEXT COLLATE "C" NOT NULL PRIMARY KEY,
    created_by    TEXT    NOT NULL,
    created_at_ms BIGINT  NOT NULL,
    expires_at_ms BIGINT  NOT NULL,
    used_by       TEXT
);

-- Resource groups in a cloud, each with the identity with which it is used. `secret` is the client secret; it is encrypted.
-- `owner` is in the tags of all resources there.
CREATE TABLE connections (
    name           TEXT COLLATE "C" NOT NULL PRIMARY KEY,
    subscription   TEXT    NOT NULL,
    tenant         TEXT    NOT NULL,
    resource_group TEXT    NOT NULL,
    region         TEXT    NOT NULL,
    owner          TEXT    NOT NULL,
    auth           TEXT    NOT NULL,
    client_id      TEXT,
    secret         BYTEA  ,
    authority      TEXT    NOT NULL,
    management     TEXT    NOT NULL,
    created_by     TEXT    NOT NULL,
    created_at_ms  BIGINT  NOT NULL
);

-- What machines are made alike from: what they boot, and the settings of a machine that is made. `cloud` has, as JSON, how they are created
-- in the cloud of `connection`; without a connection they run on hosts.
CREATE TABLE catalogs (
    name             TEXT COLLATE "C" NOT NULL PRIMARY KEY,
    image            TEXT COLLATE "C" NOT NULL,
    pin              TEXT COLLATE "C",
    scheme           BIGINT  NOT NULL,
    keep_ready       BIGINT  NOT NULL,
    ready_hours      TEXT,
    stop_idle_s      BIGINT  NOT NULL,
    cache_mode       TEXT    NOT NULL,
    cache_ram_bytes  BIGINT  NOT NULL,
    cache_disk_bytes BIGINT  NOT NULL,
    cache_weight     BIGINT  NOT NULL,
    cache_persistent BOOLEAN NOT NULL,
    transport        TEXT    NOT NULL,
    memory_bytes     BIGINT  NOT NULL,
    cpus             BIGINT  NOT NULL,
    firmware         TEXT    NOT NULL,
    secure_boot      BOOLEAN NOT NULL,
    tpm              BOOLEAN NOT NULL,
    display          TEXT    NOT NULL,
    network          TEXT    NOT NULL,
    scratch_bytes    BIGINT  NOT NULL,
    user_data        BYTEA,
    name_rule        TEXT    NOT NULL,
    first_number     BIGINT  NOT NULL,
    seal_removes     TEXT    NOT NULL,
    on_host_loss     TEXT    NOT NULL,
    connection       TEXT COLLATE "C" REFERENCES connections (name),
    cloud            TEXT,
    created_at_ms    BIGINT  NOT NULL
);

-- Versions of the settings of a catalog's machines, its scheme. The settings of the newest version are those of the catalog too.
CREATE TABLE schemes (
    catalog          TEXT COLLATE "C" NOT NULL REFERENCES catalogs (name) ON DELETE CASCADE,
    version          BIGINT  NOT NULL,
    cache_mode       TEXT    NOT NULL,
    cache_ram_bytes  BIGINT  NOT NULL,
    cache_disk_bytes BIGINT  NOT NULL,
    cache_weight     BIGINT  NOT NULL,
    cache_persistent BOOLEAN NOT NULL,
    transport        TEXT    NOT NULL,
    memory_bytes     BIGINT  NOT NULL,
    cpus             BIGINT  NOT NULL,
    firmware         TEXT    NOT NULL,
    secure_boot      BOOLEAN NOT NULL,
    tpm              BOOLEAN NOT NULL,
    display          TEXT    NOT NULL,
    network          TEXT    NOT NULL,
    scratch_bytes    BIGINT  NOT NULL,
    user_data        BYTEA,
    created_by       TEXT    NOT NULL,
    created_at_ms    BIGINT  NOT NULL,
    PRIMARY KEY (catalog, version)
);

-- Machines: settings, identity and the state that the daemon saw last. `boot` is `vm`, which the daemon starts, or `network`.
-- `name_key` is the name in a form whose bytes have the order in which people count.
-- `pin` is the version that a machine boots whatever its image's channels say, as `IMAGE@NUMBER`. `host` is one of `hosts`, or the nil UUID
-- for a machine in the cloud of `connection`, which no host runs; `cloud` has what it is there, as JSON.
-- `scheme` is the version of the catalog's scheme whose settings a machine has.
-- `kept` is the version below the persistent disk that a machine of another host has there.
-- `address` is its fixed IP address with gateway and DNS servers, and `ip` the address alone.
-- `fenced`: its node ends the machine when the node's lease is over. `to_start`: it was moved from a lost host, and is to be started.
CREATE TABLE machines (
    uuid                 TEXT COLLATE "C" NOT NULL PRIMARY KEY,
    name                 TEXT COLLATE "C" NOT NULL UNIQUE,
    name_key             TEXT COLLATE "C" NOT NULL UNIQUE,
    host                 TEXT COLLATE "C" NOT NULL,
    mac                  TEXT COLLATE "C" NOT NULL UNIQUE,
    boot                 TEXT    NOT NULL,
    image                TEXT COLLATE "C" NOT NULL,
    pin                  TEXT COLLATE "C",
    catalog              TEXT COLLATE "C" REFERENCES catalogs (name),
    connection           TEXT COLLATE "C" REFERENCES connections (name),
    cloud                TEXT,
    scheme               BIGINT,
    cache_mode           TEXT    NOT NULL,
    cache_ram_bytes      BIGINT  NOT NULL,
    cache_disk_bytes     BIGINT  NOT NULL,
    cache_weight         BIGINT  NOT NULL,
    cache_persistent     BOOLEAN NOT NULL,
    transport            TEXT    NOT NULL,
    memory_bytes         BIGINT  NOT NULL,
    cpus                 BIGINT  NOT NULL,
    firmware             TEXT    NOT NULL,
    secure_boot          BOOLEAN NOT NULL,
    tpm                  BOOLEAN NOT NULL,
    display              TEXT    NOT NULL,
    network              TEXT    NOT NULL,
    scratch_bytes        BIGINT  NOT NULL,
    host_name            TEXT    NOT NULL,
    machine_id           TEXT    NOT NULL,
    ssh_host_key_public  TEXT    NOT NULL,
    ssh_host_key_private BYTEA NOT NULL,
    ip                   TEXT COLLATE "C",
    address              TEXT,
    wanted               TEXT    NOT NULL,
    state                TEXT COLLATE "C" NOT NULL,
    reason               TEXT,
    version              TEXT COLLATE "C",
    kept                 TEXT COLLATE "C",
    boot_ms              BIGINT,
    started_at_ms        BIGINT,
    fenced               BOOLEAN NOT NULL,
    to_start             BOOLEAN NOT NULL,
    created_at_ms        BIGINT  NOT NULL
);

CREATE INDEX machines_by_state ON machines (state, name_key);

CREATE INDEX machines_by_host ON machines (host);

CREATE INDEX machines_by_ip ON machines (ip) WHERE ip IS NOT NULL;

CREATE INDEX machines_by_catalog ON machines (catalog) WHERE catalog IS NOT NULL;

-- What a machine boots is its catalog's if it has one.
CREATE VIEW machines_and_catalogs AS
    SELECT machines.*, catalogs.image AS catalog_image, catalogs.pin AS catalog_pin,
        catalogs.on_host_loss AS catalog_on_host_loss, catalogs.scheme AS catalog_scheme
    FROM machines LEFT JOIN catalogs ON catalogs.name = machines.catalog;

-- User data is up to 4 MiB long and seldom read. It has rows of its own.
CREATE TABLE user_data (
    machine TEXT COLLATE "C" NOT NULL PRIMARY KEY REFERENCES machines (uuid) ON DELETE CASCADE,
    text    BYTEA NOT NULL
);

-- Personality strings: names and values that guests read.
CREATE TABLE machine_personality (
    machine TEXT COLLATE "C" NOT NULL REFERENCES machines (uuid) ON DELETE CASCADE,
    name    TEXT COLLATE "C" NOT NULL,
    value   TEXT    NOT NULL,
    PRIMARY KEY (machine, name)
);

CREATE TABLE catalog_personality (
    catalog TEXT COLLATE "C" NOT NULL REFERENCES catalogs (name) ON DELETE CASCADE,
    name    TEXT COLLATE "C" NOT NULL,
    value   TEXT    NOT NULL,
    PRIMARY KEY (catalog, name)
);

-- Catalogs whose machines get another SSH host key at a boot if their key is older than this.
CREATE TABLE key_rotations (
    catalog TEXT COLLATE "C" NOT NULL PRIMARY KEY REFERENCES catalogs (name) ON DELETE CASCADE,
    after_s BIGINT  NOT NULL
);

-- When the SSH host key of a machine was made, if it is not the key that the machine was created with.
CREATE TABLE host_keys (
    machine    TEXT COLLATE "C" NOT NULL PRIMARY KEY REFERENCES machines (uuid) ON DELETE CASCADE,
    made_at_ms BIGINT  NOT NULL
);

-- Disks that outlive a machine's runs: that of a machine with a persistent write cache, and that with which a
-- machine edits an image. Each belongs to one version. Once `is_begun` is set, it is an error if its files are gone.
CREATE TABLE persistent_disks (
    id            TEXT COLLATE "C" NOT NULL PRIMARY KEY,
    machine       TEXT COLLATE "C" NOT NULL REFERENCES machines (uuid),
    purpose       TEXT COLLATE "C" NOT NULL CHECK (purpose IN ('persistent', 'edit')),
    image         TEXT COLLATE "C" NOT NULL,
    version       BIGINT  NOT NULL,
    hash          TEXT COLLATE "C" NOT NULL,
    author        TEXT    NOT NULL,
    created_at_ms BIGINT  NOT NULL,
    is_begun      BOOLEAN NOT NULL DEFAULT FALSE,
    UNIQUE (machine, purpose)
);

CREATE UNIQUE INDEX one_edit_for_an_image ON persistent_disks (image) WHERE purpose = 'edit';

-- Machines that are lent to somebody. A row outlives the end of its claim (`ended`) until the machine is off or was reset: a machine
-- with a row is given to nobody.
CREATE TABLE claims (
    machine       TEXT COLLATE "C" NOT NULL PRIMARY KEY REFERENCES machines (uuid) ON DELETE CASCADE,
    id            TEXT COLLATE "C" NOT NULL UNIQUE,
    holder        TEXT    NOT NULL,
    key           TEXT COLLATE "C" UNIQUE,
    claimed_by    TEXT    NOT NULL,
    created_at_ms BIGINT  NOT NULL,
    expires_at_ms BIGINT,
    reset_on      TEXT    NOT NULL,
    ended         TEXT
);

-- Named tokens of the API. The secret itself is not stored. `scopes` are the catalogs and images that the role is for
-- (`catalog:class-* image:debian`), and NULL if the role is for everything.
CREATE TABLE tokens (
    name          TEXT COLLATE "C" NOT NULL PRIMARY KEY,
    hash          TEXT COLLATE "C" NOT NULL UNIQUE,
    role          TEXT    NOT NULL,
    scopes        TEXT,
    created_by    TEXT    NOT NULL,
    created_at_ms BIGINT  NOT NULL,
    expires_at_ms BIGINT
);

-- Sessions of the web console. The secret itself is not stored.
CREATE TABLE sessions (
    hash          TEXT COLLATE "C" NOT NULL PRIMARY KEY,
    principal     TEXT    NOT NULL,
    role          TEXT    NOT NULL,
    created_at_ms BIGINT  NOT NULL,
    used_at_ms    BIGINT  NOT NULL
);

-- Work that outlives the client that asked for it. `plan` is what a task needs to go on after a restart of the daemon, as JSON.
CREATE TABLE tasks (
    id            BIGINT NOT NULL GENERATED BY DEFAULT AS IDENTITY PRIMARY KEY,
    kind          TEXT    NOT NULL,
    subject       TEXT COLLATE "C" NOT NULL,
    caller        TEXT COLLATE "C" NOT NULL,
    state         TEXT COLLATE "C" NOT NULL,
    cancelling    BOOLEAN NOT NULL DEFAULT FALSE,
    plan          TEXT,
    progress      TEXT,
    outcome       TEXT,
    created_at_ms BIGINT  NOT NULL,
    started_at_ms BIGINT,
    ended_at_ms   BIGINT
);

CREATE INDEX tasks_unended ON tasks (id) WHERE ended_at_ms IS NULL;

-- What the write cache of a machine of a catalog took, from a start to its end: for advice on sizes.
CREATE TABLE runs (
    id              BIGINT NOT NULL GENERATED BY DEFAULT AS IDENTITY PRIMARY KEY,
    catalog         TEXT COLLATE "C" NOT NULL,
    machine         TEXT COLLATE "C" NOT NULL,
    began_at_ms     BIGINT  NOT NULL,
    ended_at_ms     BIGINT  NOT NULL,
    written_bytes   BIGINT  NOT NULL,
    spilled_bytes   BIGINT  NOT NULL,
    live_peak_bytes BIGINT  NOT NULL,
    ram_peak_bytes  BIGINT  NOT NULL,
    disk_peak_bytes BIGINT  NOT NULL,
    is_limited      BOOLEAN NOT NULL
);

CREATE INDEX runs_by_catalog ON runs (catalog, id);

-- Versions of images in the gallery of a connection. A row is written before the first resource of the version is made, and removed after
-- its last resource was removed.
CREATE TABLE published_images (
    connection    TEXT COLLATE "C" NOT NULL REFERENCES connections (name),
    image         TEXT COLLATE "C" NOT NULL,
    version       BIGINT  NOT NULL,
    hash          TEXT    NOT NULL,
    state         TEXT    NOT NULL,
    generation    BIGINT  NOT NULL,
    replicas      BIGINT  NOT NULL,
    resource      TEXT    NOT NULL,
    created_by    TEXT    NOT NULL,
    created_at_ms BIGINT  NOT NULL,
    PRIMARY KEY (connection, image, version)
);

-- Requests to a cloud that were begun and whose end is not known. A row is written before the request is sent. `scope` is the work that sends
-- it, and `operation` the URL of the operation that the cloud has begun.
CREATE TABLE cloud_operations (
    id          BIGINT NOT NULL GENERATED BY DEFAULT AS IDENTITY PRIMARY KEY,
    connection  TEXT COLLATE "C" NOT NULL REFERENCES connections (name) ON DELETE CASCADE,
    scope       TEXT COLLATE "C" NOT NULL,
    path        TEXT COLLATE "C" NOT NULL,
    verb        TEXT    NOT NULL,
    api_version TEXT    NOT NULL,
    body_hash   TEXT    NOT NULL,
    operation   TEXT,
    UNIQUE (connection, scope, path)
);

-- Resources in a cloud that carry our tag and that nothing here needs, and when a sweep saw each first.
CREATE TABLE cloud_orphans (
    connection TEXT COLLATE "C" NOT NULL REFERENCES connections (name) ON DELETE CASCADE,
    resource   TEXT COLLATE "C" NOT NULL,
    seen_at_ms BIGINT  NOT NULL,
    PRIMARY KEY (connection, resource)
);

-- History: who changed what, and when. Rows are only ever added, by one unit of work at a time: their numbers are in the order of the
-- commits, so that a reader that goes on after the last number that it saw misses none.
CREATE TABLE events (
    id      BIGINT NOT NULL GENERATED BY DEFAULT AS IDENTITY PRIMARY KEY,
    at_ms   BIGINT  NOT NULL,
    caller  TEXT COLLATE "C" NOT NULL,
    subject TEXT COLLATE "C" NOT NULL,
    action  TEXT    NOT NULL,
    detail  TEXT    NOT NULL,
    -- What it changed, as JSON: {"before": {..}, "after": {..}}.
    change  TEXT,
    -- The hash of an event of the audit, of which the next one depends. NULL: the event is not in the audit.
    chain   TEXT
);

CREATE INDEX events_by_subject ON events (subject, id);

CREATE INDEX events_of_the_audit ON events (id) WHERE chain IS NOT NULL;

-- Who may change this database. `fence` grows with each grant and never falls: each unit of work of a holder begins by comparing it. Times
-- are those of the server alone.
CREATE TABLE leases (
    resource TEXT COLLATE "C" NOT NULL PRIMARY KEY,
    holder   TEXT COLLATE "C" NOT NULL,
    name     TEXT NOT NULL,
    fence    BIGINT NOT NULL,
    until    TIMESTAMPTZ NOT NULL,
    is_ended BOOLEAN NOT NULL
);
