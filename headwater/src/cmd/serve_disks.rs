//! `headwater disks`: the process that has the disks of machines.

use crate::cli::DisksArgs;
use crate::data_dir::DataDir;
use crate::disk_process::{self, Options};
use crate::logging;

/// Serves until it is not needed any more.
pub async fn run(data_dir: DataDir, args: DisksArgs) -> anyhow::Result<u8> {
    logging::to_stderr(&args.log, args.log_format)?;
    disk_process::run(data_dir, Options { ends_unused: args.end_unused }).await?;
    Ok(0)
}
