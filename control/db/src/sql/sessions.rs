//! [`SessionRepository`]: the statements that read and change sessions of the web console.

use async_trait::async_trait;
use headwater_api::Role;

use crate::error::DbError;
use crate::record::SessionRecord;
use crate::repository::{KEPT_SESSIONS, SessionRepository};
use crate::sql::Unit;
use crate::sql::statement::{Insert, Row, Statement};

pub(super) struct Sessions<'a>(pub(super) &'a mut Unit);

fn record(row: &Row) -> Result<SessionRecord, DbError> {
    Ok(SessionRecord {
        hash: row.get("hash")?,
        principal: row.get("principal")?,
        role: row.read("role", |text| Role::parse(text).ok())?,
        created_at_ms: row.number("created_at_ms")?,
        used_at_ms: row.number("used_at_ms")?,
    })
}

#[async_trait]
impl SessionRepository for Sessions<'_> {
    async fn add(&mut self, session: &SessionRecord) -> Result<(), DbError> {
        let insert = Insert::into("sessions")
            .set("hash", &session.hash)
            .set("principal", &session.principal)
            .set("role", session.role.name())
            .set("created_at_ms", session.created_at_ms)
            .set("used_at_ms", session.used_at_ms);
        self.0.add(insert, || "the session".to_owned()).await?;
        // Never delete the new session, even if older sessions have the same `used_at_ms`.
        let excess = "DELETE FROM sessions WHERE hash <> $1 AND hash NOT IN
            (SELECT hash FROM sessions WHERE hash <> $1 ORDER BY used_at_ms DESC, hash LIMIT $2)";
        self.0.run(Statement::new(excess).bind(&session.hash).bind(KEPT_SESSIONS - 1)).await.map(drop)
    }

    async fn by_hash(&mut self, hash: &str) -> Result<Option<SessionRecord>, DbError> {
        let found = self.0.row(Statement::new("SELECT * FROM sessions WHERE hash = $1").bind(hash)).await?;
        found.as_ref().map(record).transpose()
    }

    async fn used(&mut self, hash: &str, at_ms: u64) -> Result<(), DbError> {
        let update = Statement::new("UPDATE sessions SET used_at_ms = $1 WHERE hash = $2");
        self.0.run(update.bind(at_ms).bind(hash)).await.map(drop)
    }

    async fn remove(&mut self, hash: &str) -> Result<bool, DbError> {
        self.0.changes_one(Statement::new("DELETE FROM sessions WHERE hash = $1").bind(hash)).await
    }

    async fn remove_ended(&mut self, created_ms: u64, used_ms: u64) -> Result<(), DbError> {
        let ended = Statement::new("DELETE FROM sessions WHERE created_at_ms < $1 OR used_at_ms < $2");
        self.0.run(ended.bind(created_ms).bind(used_ms)).await.map(drop)
    }
}
