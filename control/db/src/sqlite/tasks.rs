//! Tasks in SQLite.

use async_trait::async_trait;
use headwater_api::TaskState;
use sqlx::sqlite::SqliteRow;
use sqlx::{FromRow, Row as _, SqliteConnection};

use crate::error::DbError;
use crate::record::{NewTask, TaskRecord};
use crate::repository::{KEPT_TASKS, TaskRepository};
use crate::sqlite::hardware::unreadable;
use crate::sqlite::{loaded, stored};

pub(super) struct SqliteTasks<'a> {
    pub(super) connection: &'a mut SqliteConnection,
}

struct Row {
    id: i64,
    kind: String,
    subject: String,
    caller: String,
    state: String,
    cancelling: bool,
    plan: Option<String>,
    progress: Option<String>,
    outcome: Option<String>,
    created_at_ms: i64,
    started_at_ms: Option<i64>,
    ended_at_ms: Option<i64>,
}

impl FromRow<'_, SqliteRow> for Row {
    fn from_row(row: &SqliteRow) -> Result<Self, sqlx::Error> {
        Ok(Self {
            id: row.try_get("id")?,
            kind: row.try_get("kind")?,
            subject: row.try_get("subject")?,
            caller: row.try_get("caller")?,
            state: row.try_get("state")?,
            cancelling: row.try_get("cancelling")?,
            plan: row.try_get("plan")?,
            progress: row.try_get("progress")?,
            outcome: row.try_get("outcome")?,
            created_at_ms: row.try_get("created_at_ms")?,
            started_at_ms: row.try_get("started_at_ms")?,
            ended_at_ms: row.try_get("ended_at_ms")?,
        })
    }
}

impl TryFrom<Row> for TaskRecord {
    type Error = DbError;

    fn try_from(row: Row) -> Result<Self, DbError> {
        Ok(Self {
            state: TaskState::parse(&row.state).ok_or_else(|| unreadable("state", &row.state))?,
            id: row.id,
            kind: row.kind,
            subject: row.subject,
            caller: row.caller,
            cancelling: row.cancelling,
            plan: row.plan,
            progress: row.progress,
            outcome: row.outcome,
            created_at_ms: loaded(row.created_at_ms),
            started_at_ms: row.started_at_ms.map(loaded),
            ended_at_ms: row.ended_at_ms.map(loaded),
        })
    }
}

#[async_trait]
impl TaskRepository for SqliteTasks<'_> {
    async fn add(&mut self, task: &NewTask) -> Result<i64, DbError> {
        let added = sqlx::query(
            "INSERT INTO tasks (kind, subject, caller, state, plan, created_at_ms) VALUES (?, ?, ?, ?, ?, ?)",
        )
        .bind(task.kind)
        .bind(&task.subject)
        .bind(&task.caller)
        .bind(TaskState::Waiting.name())
        .bind(&task.plan)
        .bind(stored(task.created_at_ms))
        .execute(&mut *self.connection)
        .await?;
        let id = added.last_insert_rowid();
        sqlx::query("DELETE FROM tasks WHERE id <= ? AND ended_at_ms IS NOT NULL")
            .bind(id.saturating_sub(KEPT_TASKS))
            .execute(&mut *self.connection)
            .await?;
        Ok(id)
    }

    async fn by_id(&mut self, id: i64) -> Result<Option<TaskRecord>, DbError> {
        let row: Option<Row> = sqlx::query_as("SELECT * FROM tasks WHERE id = ?")
            .bind(id)
            .fetch_optional(&mut *self.connection)
            .await?;
        row.map(TaskRecord::try_from).transpose()
    }

    async fn older(&mut self, before: i64, limit: u32) -> Result<Vec<TaskRecord>, DbError> {
        let rows: Vec<Row> = sqlx::query_as("SELECT * FROM tasks WHERE id < ? ORDER BY id DESC LIMIT ?")
            .bind(before)
            .bind(i64::from(limit))
            .fetch_all(&mut *self.connection)
            .await?;
        rows.into_iter().map(TaskRecord::try_from).collect()
    }

    async fn unended(&mut self) -> Result<Vec<TaskRecord>, DbError> {
        let rows: Vec<Row> = sqlx::query_as("SELECT * FROM tasks WHERE ended_at_ms IS NULL ORDER BY id")
            .fetch_all(&mut *self.connection)
            .await?;
        rows.into_iter().map(TaskRecord::try_from).collect()
    }

    async fn update(&mut self, task: &TaskRecord) -> Result<bool, DbError> {
        let done = sqlx::query(
            "UPDATE tasks SET state = ?, plan = ?, progress = ?, outcome = ?, started_at_ms = ?, ended_at_ms = ?
             WHERE id = ? AND ended_at_ms IS NULL",
        )
        .bind(task.state.name())
        .bind(&task.plan)
        .bind(&task.progress)
        .bind(&task.outcome)
        .bind(task.started_at_ms.map(stored))
        .bind(task.ended_at_ms.map(stored))
        .bind(task.id)
        .execute(&mut *self.connection)
        .await?;
        Ok(done.rows_affected() == 1)
    }

    async fn cancel(&mut self, id: i64) -> Result<bool, DbError> {
        let done = sqlx::query("UPDATE tasks SET cancelling = 1 WHERE id = ? AND ended_at_ms IS NULL")
            .bind(id)
            .execute(&mut *self.connection)
            .await?;
        Ok(done.rows_affected() == 1)
    }
}
