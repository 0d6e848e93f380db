//! Opens what an import or a pull reads (files, NBD servers, other stores), and imports a file or NBD export as a version. Called by
//! [`super::images`], and by `headwater export` for the formats of files. Paths are those of the daemon's host.

use std::io::ErrorKind;
use std::os::unix::fs::MetadataExt;
use std::path::Path;
use std::sync::Arc;
use std::time::{SystemTime, UNIX_EPOCH};

use headwater_api::{FileId, ProblemKind, SourceFormat};
use headwater_block::Device;
use headwater_image::{Backing, FileFormat, ImportOptions};
use headwater_nbd::client::ClientOptions;
use headwater_nbd::{Client, NbdUri};
use headwater_service::backend::{BackendError, ImportOrder, ImportOutcome, TaskControl};
use headwater_store::{Access, ImageName, Store, StoreErrorKind, WhileBusy};

use crate::adapters::images::{cancel_of, end_of, forward, image_failed, made, store_failed};
use crate::own_files;
use crate::stores::{self, NamedServers};

/// The disk to import, and its NBD connection, which can be cut.
pub type Source = (Arc<dyn Device>, Option<Arc<Client>>);

/// Opens the source of an import.
pub fn open(order: &ImportOrder) -> Result<Source, BackendError> {
    let source = order.source.as_str();
    if NbdUri::is_uri(source) {
        let mut uri: NbdUri =
            source.parse().map_err(|e| BackendError::new(ProblemKind::Invalid, format!("{e}")))?;
        // The client may have another working directory, so a relative path could mean another server.
        if let Some(path) = uri.paths_mut().find(|path| !path.is_absolute()) {
            let why = format!("'{source}' names '{}', which is not an absolute path", path.display());
            return Err(BackendError::new(ProblemKind::Invalid, why));
        }
        uri.paths_mut().try_for_each(|path| refuse_own_descriptors(path))?;
        let client = Client::connect(&uri, &ClientOptions::default()).map_err(|e| {
            BackendError::new(ProblemKind::Failed, "cannot read from the NBD server").because(e)
        })?;
        return Ok((client.clone(), Some(client)));
    }
    let path = Path::new(source);
    if !path.is_absolute() {
        // For the same reason, it could be another file.
        let why = format!("'{source}' is neither an absolute path nor an NBD URI");
        return Err(BackendError::new(ProblemKind::Invalid, why));
    }
    refuse_own_descriptors(path)?;
    order.source_id.map_or(Ok(()), |id| check_same_file(path, id))?;
    let backing = if order.backing { Backing::Anywhere } else { Backing::Beside };
    let format = order.format.map(file_format);
    let file = headwater_image::open_source_backed(path, format, backing).map_err(image_failed)?;
    Ok((file, None))
}

/// Opens a store that a request names.
pub fn open_store(
    name: &str,
    servers: &NamedServers,
    while_busy: WhileBusy,
) -> Result<Arc<dyn Store>, BackendError> {
    refuse_own_descriptors(Path::new(name))?;
    let credentials = servers.credentials_for(name);
    stores::open_waiting(name, Access::Read, &credentials, while_busy).map_err(|e| {
        // A server that refuses access or whose certificate is not trusted counts as unreachable too.
        let advice = servers.advice_for(name).filter(|_| e.kind() == StoreErrorKind::Unreachable);
        let failed = store_failed(e);
        match advice {
            Some(advice) => failed.advise(advice),
            None => failed,
        }
    })
}

/// Imports a source as a version.
pub fn import(
    store: &dyn Store,
    order: &ImportOrder,
    control: &Arc<TaskControl>,
) -> Result<ImportOutcome, BackendError> {
    let name: ImageName = order.name.parse().map_err(store_failed)?;
    let (device, connection) = open(order)?;
    let since_1970 = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default();
    let mut options = ImportOptions::new(name.clone(), since_1970.as_secs());
    options.source = end_of(order.source_name.as_ref().unwrap_or(&order.source));
    options.note.clone_from(&order.note);
    options.author.clone_from(&order.author);
    // With the same bytes, a second version would only be a second name for the first.
    options.unless_newest = true;
    options.sector_bytes = order.sector_bytes;
    options.cancel = cancel_of(control);
    let mut forward = forward(control);
    let mut progress = |progress| {
        forward(progress);
        // After a cancellation, reader threads could wait for a hanging server, so cut the connection.
        if let (true, Some(connection)) = (control.is_cancelled(), &connection) {
            connection.close();
        }
    };
    let imported = headwater_image::import(device, store, &options, &mut progress).map_err(image_failed)?;
    let (created, damaged_chunks) = (imported.is_new, imported.damaged_chunks);
    let remarks = imported.inspection.map_or_else(Vec::new, |found| found.remarks());
    Ok(ImportOutcome { version: made(store, name, &imported.version), created, damaged_chunks, remarks })
}

/// Refuses paths such as `/dev/stdin` and `/proc/self/fd/3`, which mean a file of the process that opens them.
pub fn refuse_own_descriptors(path: &Path) -> Result<(), BackendError> {
    own_files::refuse(path).map_err(|problem| {
        BackendError::new(problem.kind, problem.message).advise(problem.advice.unwrap_or_default())
    })
}

/// Converts a format of the API.
pub fn file_format(format: SourceFormat) -> FileFormat {
    match format {
        SourceFormat::Raw => FileFormat::Raw,
        SourceFormat::Qcow2 => FileFormat::Qcow2,
        SourceFormat::Vhd => FileFormat::Vhd,
        SourceFormat::Vhdx => FileFormat::Vhdx,
        SourceFormat::Vmdk => FileFormat::Vmdk,
    }
}

/// Fails if the path leads the daemon to another inode than the client.
fn check_same_file(path: &Path, id: FileId) -> Result<(), BackendError> {
    let refused = BackendError::new(
        ProblemKind::Invalid,
        format!("{} means another file for the daemon than for the command that imports it", path.display()),
    );
    let refused = match std::fs::metadata(path) {
        Ok(found) if (found.dev(), found.ino()) == (id.device, id.inode) => return Ok(()),
        Ok(_) => refused,
        Err(e) if e.kind() == ErrorKind::PermissionDenied => {
            let user = rustix::process::geteuid().as_raw();
            let message = format!(
                "the daemon runs as user {user} and may not open {}, the open file of a command of another user",
                path.display()
            );
            return Err(BackendError::from_io(message, e).advise(format!(
                "run the command as user {user}, as with 'sudo -u #{user}', or give the path of a file that this user may read"
            )));
        }
        Err(e) => refused.because(e),
    };
    Err(refused.advise(
        "run the command where it sees the same processes as the daemon, not in another container, or import a file by a \
         path that both can open",
    ))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn nothing_is_read_from_the_working_directory_of_the_daemon() {
        let order = |source: &str| ImportOrder {
            sector_bytes: None,
            name: "disk".to_owned(),
            source: source.to_owned(),
            format: None,
            backing: false,
            source_name: None,
            source_id: None,
            note: String::new(),
            author: String::new(),
        };
        // The first names exist in the working directory of tests.
        for source in ["Cargo.toml", "./Cargo.toml", "nbd-disk.img"] {
            let refused = open(&order(source)).err().unwrap();
            assert_eq!(refused.kind(), ProblemKind::Invalid, "{refused}");
            assert!(refused.to_string().contains("neither an absolute path"), "{refused}");
        }
    }
}
