//! The statements that read and change tasks.

use async_trait::async_trait;
use headwater_api::{Filter, TaskState};

use crate::error::DbError;
use crate::record::{NewTask, TaskRecord};
use crate::repository::{KEPT_TASKS, TaskRepository};
use crate::sql::Unit;
use crate::sql::filter::{Condition, TASKS};
use crate::sql::statement::{Insert, Row, Statement};

pub(super) struct Tasks<'a>(pub(super) &'a mut Unit);

fn record(row: &Row) -> Result<TaskRecord, DbError> {
    Ok(TaskRecord {
        id: row.get("id")?,
        kind: row.get("kind")?,
        subject: row.get("subject")?,
        caller: row.get("caller")?,
        state: row.read("state", TaskState::parse)?,
        cancelling: row.get("cancelling")?,
        plan: row.get("plan")?,
        progress: row.get("progress")?,
        outcome: row.get("outcome")?,
        created_at_ms: row.number("created_at_ms")?,
        started_at_ms: row.maybe_number("started_at_ms")?,
        ended_at_ms: row.maybe_number("ended_at_ms")?,
    })
}

#[async_trait]
impl TaskRepository for Tasks<'_> {
    async fn add(&mut self, task: &NewTask) -> Result<i64, DbError> {
        let insert = Insert::into("tasks")
            .set("kind", task.kind)
            .set("subject", &task.subject)
            .set("caller", &task.caller)
            .set("state", TaskState::Waiting.name())
            .set("cancelling", false)
            .set("plan", &task.plan)
            .set("created_at_ms", task.created_at_ms);
        let id = self.0.number(insert.statement("RETURNING id"), "id").await?;
        let old = Statement::new("DELETE FROM tasks WHERE id <= $1 AND ended_at_ms IS NOT NULL");
        self.0.run(old.bind(id.saturating_sub(KEPT_TASKS))).await?;
        Ok(id)
    }

    async fn by_id(&mut self, id: i64) -> Result<Option<TaskRecord>, DbError> {
        let found = self.0.row(Statement::new("SELECT * FROM tasks WHERE id = $1").bind(id)).await?;
        found.as_ref().map(record).transpose()
    }

    async fn page(
        &mut self,
        filter: &Filter,
        is_unended: bool,
        before: i64,
        limit: u32,
    ) -> Result<Vec<TaskRecord>, DbError> {
        let mut condition = Condition::of(filter, &TASKS, 0).and("id < ?", vec![before.into()]);
        if is_unended {
            condition = condition.and("ended_at_ms IS NULL", Vec::new());
        }
        let limit = condition.value(limit);
        let page = format!("SELECT * FROM tasks WHERE {} ORDER BY id DESC LIMIT {limit}", condition.text);
        self.0.all(Statement::new(page).bind_all(condition.values), record).await
    }

    async fn unended(&mut self) -> Result<Vec<TaskRecord>, DbError> {
        self.0.all(Statement::new("SELECT * FROM tasks WHERE ended_at_ms IS NULL ORDER BY id"), record).await
    }

    async fn update(&mut self, task: &TaskRecord) -> Result<bool, DbError> {
        let update = Statement::new(
            "UPDATE tasks SET state = $1, plan = $2, progress = $3, outcome = $4, started_at_ms = $5, ended_at_ms = $6
             WHERE id = $7 AND ended_at_ms IS NULL",
        )
        .bind(task.state.name())
        .bind(&task.plan)
        .bind(&task.progress)
        .bind(&task.outcome)
        .bind(task.started_at_ms)
        .bind(task.ended_at_ms)
        .bind(task.id);
        self.0.changes_one(update).await
    }

    async fn cancel(&mut self, id: i64) -> Result<bool, DbError> {
        let update = Statement::new("UPDATE tasks SET cancelling = $1 WHERE id = $2 AND ended_at_ms IS NULL");
        self.0.changes_one(update.bind(true).bind(id)).await
    }
}
