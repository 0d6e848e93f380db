//! The answer of a long operation: one JSON object per line while the operation runs.
//!
//! Import, pull, verify, seal, diff, export, scale, roll, drain, publish, unpublish and sweep are tasks ([`crate::task`]). The answer has the
//! type `application/x-ndjson`: any number of `waiting` lines while other tasks run, then of `progress` lines, then
//! exactly one `done` or `failed` line. The header `headwater-task` is the task's number. If the client disconnects,
//! the task continues.

use serde::{Deserialize, Serialize};
use utoipa::ToSchema;

use crate::connection::{PublishReport, PublishedImage, SweepReport};
use crate::host::DrainReport;
use crate::image::{DiffReport, ImageVersion, PullReport, VerifyReport};
use crate::maintenance::Sealed;
use crate::problem::Problem;
use crate::roll::{RollReport, ScaleReport};

/// The progress of a task.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct Progress {
    /// Bytes that are done.
    pub done_bytes: u64,
    /// The total of bytes; 0 if it is unknown.
    pub total_bytes: u64,
    /// The present step, for people, if the bytes do not show it. Examples: a verification has read all bytes and repairs,
    /// or searches for
    /// the files that damage affects; a comparison has read all changes and compares files; a pull reads lists and
    /// manifests
    /// before it copies, or waits for a server.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub doing: Option<String>,
}

/// The result of a task that succeeded.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(tag = "kind", rename_all = "snake_case")]
pub enum TaskResult {
    /// The version that the import made, or the existing version with the same bytes.
    Imported {
        /// The version.
        version: ImageVersion,
        /// Whether the import made it.
        created: bool,
        /// The number of chunks of this disk that the store already had, but damaged. The new version has intact copies;
        /// older versions that share the damaged chunks need a repair.
        #[serde(default)]
        damaged_chunks: u64,
        /// Notes on the disk, one line each: machines cannot boot it, its contents are unknown, its sectors have 4,096
        /// bytes.
        #[serde(default, skip_serializing_if = "Vec::is_empty")]
        remarks: Vec<String>,
        /// The machine of the image's maintenance session, which has an older version below its disk. To seal the session,
        /// the request
        /// then needs `over_newer`.
        #[serde(default, skip_serializing_if = "Option::is_none")]
        edited_by: Option<String>,
    },
    /// The result of copying versions from another store.
    Pulled(Box<PullReport>),
    /// What the verification found.
    Verified(Box<VerifyReport>),
    /// What the comparison found.
    Compared(Box<DiffReport>),
    /// The version that was made of a disk.
    Sealed(Box<Sealed>),
    /// A version was written to a file.
    Exported {
        /// The version.
        version: ImageVersion,
        /// The file's size.
        size_bytes: u64,
    },
    /// The machines of a catalog that were created or removed.
    Scaled(Box<ScaleReport>),
    /// The result of moving a catalog's machines to a version.
    Rolled(Box<RollReport>),
    /// The result of moving all machines away from a host.
    Drained(Box<DrainReport>),
    /// A version was published to a cloud.
    Published(Box<PublishReport>),
    /// A published version was removed from a cloud.
    Unpublished(Box<PublishedImage>),
    /// The resources in a cloud that nothing here needs.
    Swept(Box<SweepReport>),
}

/// One line of the answer.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(tag = "event", rename_all = "snake_case")]
pub enum TaskEvent {
    /// The task has not begun.
    Waiting {
        /// How many other tasks run, which is the most that may run at once.
        running: u64,
    },
    /// The task makes progress.
    Progress(Progress),
    /// The task succeeded.
    Done {
        /// The result.
        result: TaskResult,
    },
    /// The task failed.
    Failed {
        /// Why it failed.
        problem: Problem,
    },
}
