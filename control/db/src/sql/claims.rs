//! The statements that read and change claims.

use async_trait::async_trait;
use headwater_api::ResetOn;
use uuid::Uuid;

use crate::error::DbError;
use crate::record::ClaimRecord;
use crate::repository::ClaimRepository;
use crate::sql::Unit;
use crate::sql::statement::{Insert, Row, Statement, unreadable};

pub(super) struct Claims<'a>(pub(super) &'a mut Unit);

fn record(row: &Row) -> Result<ClaimRecord, DbError> {
    let reset_on: String = row.get("reset_on")?;
    Ok(ClaimRecord {
        id: row.uuid("id")?,
        machine: row.uuid("machine")?,
        holder: row.get("holder")?,
        key: row.get("key")?,
        claimed_by: row.get("claimed_by")?,
        created_at_ms: row.number("created_at_ms")?,
        expires_at_ms: row.maybe_number("expires_at_ms")?,
        reset_on: ResetOn::parse(&reset_on).map_err(|_| unreadable("reset_on", &reset_on))?,
        ended: row.get("ended")?,
    })
}

#[async_trait]
impl ClaimRepository for Claims<'_> {
    async fn add(&mut self, claim: &ClaimRecord) -> Result<(), DbError> {
        let insert = Insert::into("claims")
            .set("machine", claim.machine)
            .set("id", claim.id)
            .set("holder", &claim.holder)
            .set("key", &claim.key)
            .set("claimed_by", &claim.claimed_by)
            .set("created_at_ms", claim.created_at_ms)
            .set("expires_at_ms", claim.expires_at_ms)
            .set("reset_on", claim.reset_on.name())
            .set("ended", &claim.ended);
        self.0.add(insert, || format!("claim of machine {}", claim.machine)).await
    }

    async fn list(&mut self) -> Result<Vec<ClaimRecord>, DbError> {
        self.0.all(Statement::new("SELECT * FROM claims ORDER BY created_at_ms, id"), record).await
    }

    async fn end(&mut self, id: Uuid, why: &str) -> Result<bool, DbError> {
        let update = Statement::new("UPDATE claims SET ended = $1 WHERE id = $2 AND ended IS NULL");
        self.0.changes_one(update.bind(why).bind(id)).await
    }

    async fn remove(&mut self, id: Uuid) -> Result<bool, DbError> {
        self.0.changes_one(Statement::new("DELETE FROM claims WHERE id = $1").bind(id)).await
    }
}
