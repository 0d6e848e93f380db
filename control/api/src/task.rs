//! Tasks: long operations, such as imports and rolls, that continue if the client disconnects. Types of lists of
//! tasks; what a client sees while it follows one is in [`crate::task_event`].

use serde::{Deserialize, Serialize};
use utoipa::ToSchema;

use crate::problem::Problem;
use crate::task_event::{Progress, TaskResult};

/// The most tasks of one answer.
pub const MAX_TASKS: u32 = 1000;

/// The state of a task.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize, ToSchema)]
#[serde(rename_all = "snake_case")]
pub enum TaskState {
    /// It has not begun, because other tasks run.
    Waiting,
    /// It runs.
    Running,
    /// It succeeded.
    Done,
    /// It failed.
    Failed,
    /// A user cancelled it, or the daemon stopped.
    Cancelled,
}

impl TaskState {
    /// All states.
    pub const ALL: [Self; 5] = [Self::Waiting, Self::Running, Self::Done, Self::Failed, Self::Cancelled];

    /// The state's name in answers and in the database.
    pub const fn name(self) -> &'static str {
        match self {
            Self::Waiting => "waiting",
            Self::Running => "running",
            Self::Done => "done",
            Self::Failed => "failed",
            Self::Cancelled => "cancelled",
        }
    }

    /// Parses the output of [`TaskState::name`].
    pub fn parse(text: &str) -> Option<Self> {
        Self::ALL.into_iter().find(|state| state.name() == text)
    }

    /// Whether the task has ended.
    pub const fn has_ended(self) -> bool {
        matches!(self, Self::Done | Self::Failed | Self::Cancelled)
    }
}

impl std::fmt::Display for TaskState {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str(self.name())
    }
}

/// A task: a long operation that continues if the client disconnects.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct Task {
    /// Its number; later tasks have higher ones.
    pub id: i64,
    /// The operation: `import`, `pull`, `verify`, `compare`, `seal`, `export`, `scale`, `roll`, `drain`, `publish`,
    /// `unpublish` or `sweep`.
    pub kind: String,
    /// The subject: `image debian`, `catalog class`.
    pub subject: String,
    /// The caller that requested it.
    pub caller: String,
    /// The task's state.
    pub state: TaskState,
    /// Whether a user has requested to cancel it.
    pub cancelling: bool,
    /// The progress in bytes or in words.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub progress: Option<Progress>,
    /// The result, if the task succeeded.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub result: Option<Box<TaskResult>>,
    /// Why the task failed or was cancelled.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub problem: Option<Problem>,
    /// When the task was requested.
    pub created_at_ms: u64,
    /// When the task began.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub started_at_ms: Option<u64>,
    /// When the task ended.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub ended_at_ms: Option<u64>,
}

/// The newest tasks.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct TaskList {
    /// Newest first.
    pub tasks: Vec<Task>,
}
