//! The statements that read and change runs.

use async_trait::async_trait;

use crate::error::DbError;
use crate::record::RunRecord;
use crate::repository::{KEPT_RUNS, RunRepository};
use crate::sql::Unit;
use crate::sql::statement::{Insert, Row, Statement};

pub(super) struct Runs<'a>(pub(super) &'a mut Unit);

fn record(row: &Row) -> Result<RunRecord, DbError> {
    Ok(RunRecord {
        catalog: row.get("catalog")?,
        machine: row.get("machine")?,
        began_at_ms: row.number("began_at_ms")?,
        ended_at_ms: row.number("ended_at_ms")?,
        written_bytes: row.number("written_bytes")?,
        spilled_bytes: row.number("spilled_bytes")?,
        live_peak_bytes: row.number("live_peak_bytes")?,
        ram_peak_bytes: row.number("ram_peak_bytes")?,
        disk_peak_bytes: row.number("disk_peak_bytes")?,
        is_limited: row.get("is_limited")?,
    })
}

#[async_trait]
impl RunRepository for Runs<'_> {
    async fn add(&mut self, run: &RunRecord) -> Result<(), DbError> {
        let insert = Insert::into("runs")
            .set("catalog", &run.catalog)
            .set("machine", &run.machine)
            .set("began_at_ms", run.began_at_ms)
            .set("ended_at_ms", run.ended_at_ms)
            .set("written_bytes", run.written_bytes)
            .set("spilled_bytes", run.spilled_bytes)
            .set("live_peak_bytes", run.live_peak_bytes)
            .set("ram_peak_bytes", run.ram_peak_bytes)
            .set("disk_peak_bytes", run.disk_peak_bytes)
            .set("is_limited", run.is_limited);
        self.0.add(insert, || "the run".to_owned()).await?;
        let excess = "DELETE FROM runs WHERE catalog = $1 AND id NOT IN
            (SELECT id FROM runs WHERE catalog = $1 ORDER BY id DESC LIMIT $2)";
        self.0.run(Statement::new(excess).bind(&run.catalog).bind(KEPT_RUNS)).await.map(drop)
    }

    async fn of_catalog(&mut self, catalog: &str) -> Result<Vec<RunRecord>, DbError> {
        let select = Statement::new("SELECT * FROM runs WHERE catalog = $1 ORDER BY id DESC").bind(catalog);
        self.0.all(select, record).await
    }

    async fn remove_of_catalog(&mut self, catalog: &str) -> Result<(), DbError> {
        let remove = Statement::new("DELETE FROM runs WHERE catalog = $1").bind(catalog);
        self.0.run(remove).await.map(drop)
    }
}
