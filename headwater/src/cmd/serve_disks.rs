//! `headwater disks`: the keeper of disks, which starts itself again as the process that has the disks of machines.

use crate::cli::DisksArgs;
use crate::data_dir::DataDir;
use crate::disk_process::{self, Options};
use crate::logging;

/// Serves until it is not needed any more.
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
