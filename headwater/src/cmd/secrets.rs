//! `headwater secrets rotate-key`: encrypts the secrets in the database with a new key. Works on the database itself,
//! so the daemon must not run.

use serde::Serialize;

use crate::cli::SecretsCommand;
use crate::daemon::database::{OpenDatabase, has_open_disks};
use crate::data_dir::DataDir;
use crate::secrets_key::SecretsKeyFile;
use crate::show;

/// What was encrypted, for programs.
#[derive(Serialize)]
struct Report {
    rotated: u64,
}

/// Changes the key. The daemon does not run.
pub async fn run(data_dir: DataDir, command: SecretsCommand, json: bool) -> anyhow::Result<u8> {
    let SecretsCommand::RotateKey { database } = command;
    let _lock = data_dir.lock()?;
    let keys = SecretsKeyFile::of(&data_dir, database.secrets_key.as_deref());
    let opened = OpenDatabase::open(&data_dir, database.alone()?, &keys).await?;
    let rotated = keys.rotate(&*opened.secrets).await;
    // Machines that are on keep the lease, as when their daemon ends.
    opened.close(has_open_disks(&data_dir)).await;
    let rotated = rotated?;
    if json {
        show::json(&Report { rotated })?;
    } else {
        show::line(&format!("encrypted {rotated} secret(s) with a new key, which is in {}", keys.display()))?;
        show::aside("earlier backups need the earlier key: keep it\n");
    }
    Ok(0)
}
