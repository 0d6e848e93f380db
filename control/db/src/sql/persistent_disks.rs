//! The statements that read and change persistent disks, including those of maintenance sessions.

use async_trait::async_trait;
use uuid::Uuid;

use crate::error::DbError;
use crate::record::{PersistentDisk, Purpose};
use crate::repository::PersistentDiskRepository;
use crate::sql::Unit;
use crate::sql::statement::{Insert, Row, Statement};

pub(super) struct PersistentDisks<'a>(pub(super) &'a mut Unit);

fn record(row: &Row) -> Result<PersistentDisk, DbError> {
    Ok(PersistentDisk {
        id: row.uuid("id")?,
        machine: row.uuid("machine")?,
        purpose: row.read("purpose", Purpose::parse)?,
        image: row.get("image")?,
        version: row.number("version")?,
        hash: row.get("hash")?,
        author: row.get("author")?,
        created_at_ms: row.number("created_at_ms")?,
        is_begun: row.get("is_begun")?,
    })
}

#[async_trait]
impl PersistentDiskRepository for PersistentDisks<'_> {
    async fn add(&mut self, disk: &PersistentDisk) -> Result<(), DbError> {
        let insert = Insert::into("persistent_disks")
            .set("id", disk.id)
            .set("machine", disk.machine)
            .set("purpose", disk.purpose.name())
            .set("image", &disk.image)
            .set("version", disk.version)
            .set("hash", &disk.hash)
            .set("author", &disk.author)
            .set("created_at_ms", disk.created_at_ms)
            .set("is_begun", disk.is_begun);
        self.0.add(insert, || format!("a disk over '{}'", disk.below())).await
    }

    async fn of_machine(&mut self, machine: Uuid) -> Result<Vec<PersistentDisk>, DbError> {
        let disks = Statement::new("SELECT * FROM persistent_disks WHERE machine = $1 ORDER BY purpose");
        self.0.all(disks.bind(machine), record).await
    }

    async fn session_of(&mut self, image: &str) -> Result<Option<PersistentDisk>, DbError> {
        let found = Statement::new("SELECT * FROM persistent_disks WHERE image = $1 AND purpose = 'edit'")
            .bind(image);
        self.0.row(found).await?.as_ref().map(record).transpose()
    }

    async fn list(&mut self) -> Result<Vec<PersistentDisk>, DbError> {
        self.0.all(Statement::new("SELECT * FROM persistent_disks ORDER BY created_at_ms, id"), record).await
    }

    async fn begun(&mut self, id: Uuid) -> Result<(), DbError> {
        let update = Statement::new("UPDATE persistent_disks SET is_begun = $1 WHERE id = $2");
        self.0.run(update.bind(true).bind(id)).await.map(drop)
    }

    async fn remove(&mut self, id: Uuid) -> Result<bool, DbError> {
        self.0.changes_one(Statement::new("DELETE FROM persistent_disks WHERE id = $1").bind(id)).await
    }
}
