//! The statements that read and change hosts, and the tokens with which they join.

use async_trait::async_trait;
use headwater_api::HostState;
use headwater_api::name::natural;
use uuid::Uuid;

use crate::error::DbError;
use crate::record::{AuthorityRecord, HostRecord, JoinTokenRecord};
use crate::repository::HostRepository;
use crate::sql::Unit;
use crate::sql::statement::{Insert, Row, Statement};

/// What the authority is for: it signs certificates of nodes.
const NODES: &str = "nodes";

/// The column of its key.
const AUTHORITY_KEY: &str = "authorities.key";

pub(super) struct Hosts<'a>(pub(super) &'a mut Unit);

fn record(row: &Row) -> Result<HostRecord, DbError> {
    Ok(HostRecord {
        id: row.uuid("id")?,
        name: row.get("name")?,
        fingerprint: row.get("fingerprint")?,
        state: row.read("state", HostState::parse)?,
        cordoned: row.get("cordoned")?,
        memory_bytes: row.number("memory_bytes")?,
        cpus: row.count("cpus")?,
        generation: row.number("generation")?,
        seen_event: row.get("seen_event")?,
        lease_ms: row.number("lease_ms")?,
        joined_at_ms: row.number("joined_at_ms")?,
        seen_at_ms: row.maybe_number("seen_at_ms")?,
    })
}

fn token(row: &Row) -> Result<JoinTokenRecord, DbError> {
    Ok(JoinTokenRecord {
        hash: row.get("hash")?,
        created_by: row.get("created_by")?,
        created_at_ms: row.number("created_at_ms")?,
        expires_at_ms: row.number("expires_at_ms")?,
        used_by: row.get("used_by")?,
    })
}

#[async_trait]
impl HostRepository for Hosts<'_> {
    async fn add(&mut self, host: &HostRecord) -> Result<(), DbError> {
        let insert = Insert::into("hosts")
            .set("id", host.id)
            .set("name", &host.name)
            .set("fingerprint", &host.fingerprint)
            .set("state", host.state.name())
            .set("cordoned", host.cordoned)
            .set("memory_bytes", host.memory_bytes)
            .set("cpus", host.cpus)
            .set("generation", host.generation)
            .set("seen_event", host.seen_event)
            .set("lease_ms", host.lease_ms)
            .set("joined_at_ms", host.joined_at_ms)
            .set("seen_at_ms", host.seen_at_ms);
        self.0.add(insert, || format!("host '{}'", host.name)).await
    }

    async fn by_id(&mut self, id: Uuid) -> Result<Option<HostRecord>, DbError> {
        let found = self.0.row(Statement::new("SELECT * FROM hosts WHERE id = $1").bind(id)).await?;
        found.as_ref().map(record).transpose()
    }

    async fn list(&mut self) -> Result<Vec<HostRecord>, DbError> {
        let mut records = self.0.all(Statement::new("SELECT * FROM hosts"), record).await?;
        records.sort_by(|a, b| natural(&a.name, &b.name));
        Ok(records)
    }

    async fn update(&mut self, host: &HostRecord) -> Result<bool, DbError> {
        let update = Statement::new(
            "UPDATE hosts SET state = $1, cordoned = $2, memory_bytes = $3, cpus = $4, generation = $5, seen_event = $6,
               seen_at_ms = $7, lease_ms = $8
             WHERE id = $9",
        )
        .bind(host.state.name())
        .bind(host.cordoned)
        .bind(host.memory_bytes)
        .bind(host.cpus)
        .bind(host.generation)
        .bind(host.seen_event)
        .bind(host.seen_at_ms)
        .bind(host.lease_ms)
        .bind(host.id);
        self.0.changes_one(update).await
    }

    async fn remove(&mut self, id: Uuid) -> Result<bool, DbError> {
        self.0.changes_one(Statement::new("DELETE FROM hosts WHERE id = $1").bind(id)).await
    }

    async fn set_boot(&mut self, machine: Uuid, image: &str, pin: Option<&str>) -> Result<bool, DbError> {
        let update = Statement::new("UPDATE machines SET image = $1, pin = $2 WHERE uuid = $3");
        self.0.changes_one(update.bind(image).bind(pin).bind(machine)).await
    }

    async fn authority(&mut self) -> Result<Option<AuthorityRecord>, DbError> {
        let find = Statement::new("SELECT key, certificate FROM authorities WHERE purpose = $1");
        let found = self.0.row(find.bind(NODES)).await?;
        let Some(row) = found else { return Ok(None) };
        let key = self.0.key.decrypt(AUTHORITY_KEY, NODES, row.get("key")?)?;
        Ok(Some(AuthorityRecord { key, certificate: row.get("certificate")? }))
    }

    async fn add_authority(&mut self, authority: &AuthorityRecord) -> Result<(), DbError> {
        let key = self.0.key.encrypt(AUTHORITY_KEY, NODES, &authority.key)?;
        let insert = Insert::into("authorities")
            .set("purpose", NODES)
            .set("key", key)
            .set("certificate", &authority.certificate);
        self.0.add(insert, || "authority of nodes".to_owned()).await
    }

    async fn add_token(&mut self, token: &JoinTokenRecord, ended_ms: u64) -> Result<(), DbError> {
        self.0.run(Statement::new("DELETE FROM join_tokens WHERE expires_at_ms < $1").bind(ended_ms)).await?;
        let insert = Insert::into("join_tokens")
            .set("hash", &token.hash)
            .set("created_by", &token.created_by)
            .set("created_at_ms", token.created_at_ms)
            .set("expires_at_ms", token.expires_at_ms)
            .set("used_by", &token.used_by);
        self.0.add(insert, || "join token".to_owned()).await
    }

    async fn token(&mut self, hash: &str) -> Result<Option<JoinTokenRecord>, DbError> {
        let found =
            self.0.row(Statement::new("SELECT * FROM join_tokens WHERE hash = $1").bind(hash)).await?;
        found.as_ref().map(token).transpose()
    }

    async fn use_token(&mut self, hash: &str, host: &str) -> Result<(), DbError> {
        let update = Statement::new("UPDATE join_tokens SET used_by = $1 WHERE hash = $2");
        self.0.run(update.bind(host).bind(hash)).await.map(|_| ())
    }
}
