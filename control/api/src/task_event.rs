//! Long operations: one JSON object a line while they go on.
//!
//! Import, pull, verify, seal, diff, export, scale, roll and drain are tasks ([`crate::task`]). Their answer is `application/x-ndjson`: any number
//! of `waiting` lines while others run, then of `progress` lines, then exactly one `done` or `failed` line. The header
//! `headwater-task` has the task's number. A client that hangs up leaves the task as it is.

use serde::{Deserialize, Serialize};
use utoipa::ToSchema;

use crate::host::DrainReport;
use crate::image::{DiffReport, ImageVersion, PullReport, VerifyReport};
use crate::maintenance::Sealed;
use crate::problem::Problem;
use crate::roll::{RollReport, ScaleReport};

/// How far an operation is.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct Progress {
    /// Bytes done.
    pub done_bytes: u64,
    /// Bytes in all; 0 while that is unknown.
    pub total_bytes: u64,
    /// What it does now, for people, where these bytes do not say it: a verification that repairs, or looks for what the damage
    /// touches, has read them all, and a comparison that looks at files has read all changes; a pull reads lists and manifests
    /// before, and may wait for a server.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub doing: Option<String>,
}

/// What an operation ended with.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(tag = "kind", rename_all = "snake_case")]
pub enum TaskResult {
    /// The version that the import made, or the one that already held the same bytes.
    Imported {
        /// It.
        version: ImageVersion,
        /// Whether the import made it.
        created: bool,
        /// Chunks that the store had, and that are damaged there. This version has sound ones in their place;
        /// older versions that share them need a repair.
        #[serde(default)]
        damaged_chunks: u64,
        /// Remarks on the disk, a line each: machines cannot boot it, nothing on it is known, its sectors have 4,096 bytes.
        #[serde(default, skip_serializing_if = "Vec::is_empty")]
        remarks: Vec<String>,
        /// The machine that edits the image, over an older version: what it does is sealed over that version only where the
        /// request says so.
        #[serde(default, skip_serializing_if = "Option::is_none")]
        edited_by: Option<String>,
    },
    /// What came of another store.
    Pulled(Box<PullReport>),
    /// What the verification found.
    Verified(Box<VerifyReport>),
    /// What the comparison found.
    Compared(Box<DiffReport>),
    /// The version that was made of a disk.
    Sealed(Box<Sealed>),
    /// The version that was written out.
    Exported {
        /// It.
        version: ImageVersion,
        /// The file's size.
        size_bytes: u64,
    },
    /// The machines that a catalog was given, or that were removed.
    Scaled(Box<ScaleReport>),
    /// The version that a catalog's machines were moved to.
    Rolled(Box<RollReport>),
    /// The machines that were moved from a host.
    Drained(Box<DrainReport>),
}

/// One line of the answer.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(tag = "event", rename_all = "snake_case")]
pub enum TaskEvent {
    /// It has not begun.
    Waiting {
        /// How many others run, as many as may at once.
        running: u64,
    },
    /// It goes on.
    Progress(Progress),
    /// It is over, and went well.
    Done {
        /// What came of it.
        result: TaskResult,
    },
    /// It is over, and failed.
    Failed {
        /// Why.
        problem: Problem,
    },
}
