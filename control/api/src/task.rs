//! Tasks: work that outlives the client that asked for it.

use serde::{Deserialize, Serialize};
use utoipa::ToSchema;

use crate::problem::Problem;
use crate::task_event::{Progress, TaskResult};

/// The most tasks of one answer.
pub const MAX_TASKS: u32 = 1000;

/// How far a task is.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize, ToSchema)]
#[serde(rename_all = "snake_case")]
pub enum TaskState {
    /// It has not begun: others run.
    Waiting,
    /// It runs.
    Running,
    /// It ended well.
    Done,
    /// It failed.
    Failed,
    /// Somebody ended it, or the daemon stopped.
    Cancelled,
}

impl TaskState {
    /// All of them.
    pub const ALL: [Self; 5] = [Self::Waiting, Self::Running, Self::Done, Self::Failed, Self::Cancelled];

    /// As written in answers and in the database.
    pub const fn name(self) -> &'static str {
        match self {
            Self::Waiting => "waiting",
            Self::Running => "running",
            Self::Done => "done",
            Self::Failed => "failed",
            Self::Cancelled => "cancelled",
        }
    }

    /// Reads what [`TaskState::name`] gave.
    pub fn parse(text: &str) -> Option<Self> {
        Self::ALL.into_iter().find(|state| state.name() == text)
    }

    /// Whether nothing more comes of it.
    pub const fn has_ended(self) -> bool {
        matches!(self, Self::Done | Self::Failed | Self::Cancelled)
    }
}

impl std::fmt::Display for TaskState {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str(self.name())
    }
}

/// A task.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct Task {
    /// Its number; later tasks have higher ones.
    pub id: i64,
    /// What it does: `import`, `pull`, `verify`, `compare`, `seal`, `export`, `scale` or `roll`.
    pub kind: String,
    /// On what: `image debian`, `catalog class`.
    pub subject: String,
    /// Who asked for it.
    pub caller: String,
    /// How far it is.
    pub state: TaskState,
    /// Somebody asked for its end.
    pub cancelling: bool,
    /// How far it is, in bytes or in words.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub progress: Option<Progress>,
    /// What it ended with, if it is done.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub result: Option<Box<TaskResult>>,
    /// Why it failed or was ended.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub problem: Option<Problem>,
    /// When it was asked for.
    pub created_at_ms: u64,
    /// When it began.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub started_at_ms: Option<u64>,
    /// When it ended.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub ended_at_ms: Option<u64>,
}

/// The newest tasks.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct TaskList {
    /// Newest first.
    pub tasks: Vec<Task>,
}
