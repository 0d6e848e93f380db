//! `headwater upgrade`: has another program serve the disks of machines that are on. It asks the keeper of disks (see
//! [`crate::disk_process`]), which starts that program and hands the disks over; machines stay on.

use anyhow::Context;

use crate::cli::UpgradeArgs;
use crate::data_dir::DataDir;
use crate::{disk_process, show};

/// Has the keeper of disks start another program, and waits until that serves the disks.
pub fn run(data_dir: &DataDir, args: &UpgradeArgs, json: bool) -> anyhow::Result<u8> {
    let program = match &args.program {
        Some(program) => program.clone(),
        None => std::env::current_exe().context("cannot find the file of this program")?,
    };
    let said = disk_process::upgrade(data_dir, &program)?;
    if json { show::json(&serde_json::json!({ "message": said })) } else { show::line(&said) }?;
    Ok(0)
}
