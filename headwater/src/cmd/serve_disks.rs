//! `headwater disks`: runs as one of two processes. Started by a user or by `serve`, it is the keeper: it holds the file descriptors of all
//! disks and starts a child, the disk process, again after a crash. The child is the same command with `HEADWATER_KEPT` set; it serves the
//! disks. The work of both is in `disk_process`.

use crate::cli::DisksArgs;
use crate::data_dir::DataDir;
use crate::disk_process::{self, Options};
use crate::logging;

/// Runs the keeper or the disk process until no daemon needs it. Returns the exit code.
pub fn run(data_dir: &DataDir, args: &DisksArgs) -> anyhow::Result<u8> {
    if args.versions {
        crate::show::json(&disk_process::Versions::own())?;
        return Ok(0);
    }
    super::own_only();
    logging::check_filter(&args.log)?;
    if !disk_process::is_kept() {
        logging::to_stderr(&args.log, args.log_format)?;
        return disk_process::keep(data_dir);
    }
    // The log has a thread, and so has the runtime: they start when the process has restricted itself.
    let Some(prepared) = disk_process::prepare(data_dir, Options { ends_unused: args.end_unused })? else {
        return Ok(0);
    };
    logging::to_stderr(&args.log, args.log_format)?;
    super::as_daemon(async {
        let code = prepared.serve().await?;
        if code == disk_process::HANDED_OVER {
            // Machines wait for the next process. What this one still does is of no use to them.
            logging::flush();
            std::process::exit(i32::from(code));
        }
        Ok(code)
    })
}
