//! The statements about personality strings.

use std::collections::BTreeMap;

use async_trait::async_trait;
use uuid::Uuid;

use crate::error::DbError;
use crate::repository::PersonalityRepository;
use crate::sql::Unit;
use crate::sql::statement::{Insert, Row, Statement, Value};

pub(super) struct Personalities<'a>(pub(super) &'a mut Unit);

/// The table and its column of owners.
const MACHINES: (&str, &str) = ("machine_personality", "machine");
const CATALOGS: (&str, &str) = ("catalog_personality", "catalog");

impl Personalities<'_> {
    async fn of(
        &mut self,
        (table, column): (&'static str, &'static str),
        owner: impl Into<Value>,
    ) -> Result<BTreeMap<String, String>, DbError> {
        let all = format!("SELECT name, value FROM {table} WHERE {column} = $1 ORDER BY name");
        let all = Statement::new(all).bind(owner);
        let pairs = self.0.all(all, |row: &Row| Ok((row.get("name")?, row.get("value")?))).await?;
        Ok(pairs.into_iter().collect())
    }

    async fn replace(
        &mut self,
        (table, column): (&'static str, &'static str),
        owner: Value,
        strings: &BTreeMap<String, String>,
    ) -> Result<(), DbError> {
        let before = Statement::new(format!("DELETE FROM {table} WHERE {column} = $1"));
        self.0.run(before.bind(owner.clone())).await?;
        for (name, value) in strings {
            let insert = Insert::into(table).set(column, owner.clone()).set("name", name).set("value", value);
            self.0.add(insert, || format!("personality string '{name}'")).await?;
        }
        Ok(())
    }
}

#[async_trait]
impl PersonalityRepository for Personalities<'_> {
    async fn of_machine(&mut self, machine: Uuid) -> Result<BTreeMap<String, String>, DbError> {
        self.of(MACHINES, machine).await
    }

    async fn of_catalog(&mut self, catalog: &str) -> Result<BTreeMap<String, String>, DbError> {
        self.of(CATALOGS, catalog).await
    }

    async fn set_of_machine(
        &mut self,
        machine: Uuid,
        strings: &BTreeMap<String, String>,
    ) -> Result<(), DbError> {
        self.replace(MACHINES, machine.into(), strings).await
    }

    async fn set_of_catalog(
        &mut self,
        catalog: &str,
        strings: &BTreeMap<String, String>,
    ) -> Result<(), DbError> {
        self.replace(CATALOGS, catalog.into(), strings).await
    }
}
