//! The statements about the age of machines' SSH host keys.

use async_trait::async_trait;
use uuid::Uuid;

use crate::error::DbError;
use crate::repository::KeyRepository;
use crate::sql::Unit;
use crate::sql::statement::{Insert, Row, Statement};

pub(super) struct Keys<'a>(pub(super) &'a mut Unit);

#[async_trait]
impl KeyRepository for Keys<'_> {
    async fn set_rotate_after(&mut self, catalog: &str, after_s: u64) -> Result<(), DbError> {
        self.0.run(Statement::new("DELETE FROM key_rotations WHERE catalog = $1").bind(catalog)).await?;
        if after_s == 0 {
            return Ok(());
        }
        let insert = Insert::into("key_rotations").set("catalog", catalog).set("after_s", after_s);
        self.0.add(insert, || format!("rotation of keys of catalog '{catalog}'")).await
    }

    async fn rotate_after(&mut self) -> Result<Vec<(String, u64)>, DbError> {
        let all = Statement::new("SELECT catalog, after_s FROM key_rotations ORDER BY catalog");
        self.0.all(all, |row: &Row| Ok((row.get("catalog")?, row.number("after_s")?))).await
    }

    async fn set_made_at(&mut self, machine: Uuid, made_at_ms: u64) -> Result<(), DbError> {
        self.0.run(Statement::new("DELETE FROM host_keys WHERE machine = $1").bind(machine)).await?;
        let insert = Insert::into("host_keys").set("machine", machine).set("made_at_ms", made_at_ms);
        self.0.add(insert, || format!("age of the key of machine {machine}")).await
    }

    async fn made_at(&mut self, machine: Uuid) -> Result<Option<u64>, DbError> {
        let find = Statement::new("SELECT made_at_ms FROM host_keys WHERE machine = $1").bind(machine);
        self.0.row(find).await?.map(|row| row.number("made_at_ms")).transpose()
    }
}
