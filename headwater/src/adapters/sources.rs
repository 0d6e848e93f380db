//! What is imported: files, and what NBD servers serve.

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

/// What an image is made of, and the connection that brings it, where there is one to cut.
pub type Source = (Arc<dyn Device>, Option<Arc<Client>>);

/// Opens what is to be imported. Any device is a source: a file, or what an NBD server serves, then with its connection.
pub fn open(order: &ImportOrder) -> Result<Source, BackendError> {
    let source = order.source.as_str();
    if NbdUri::is_uri(source) {
        let mut uri: NbdUri =
            source.parse().map_err(|e| BackendError::new(ProblemKind::Invalid, format!("{e}")))?;
        // Whoever asks has another working directory, and so would mean another server.
        if let Some(path) = uri.paths_mut().find(|path| !path.is_absolute()) {
            let why = format!("'{source}' names '{}', which is not an absolute path", path.display());
            return Err(BackendError::new(ProblemKind::Invalid, why));
        }
        uri.paths_mut().try_for_each(|path| whole_host(path))?;
        let client = Client::connect(&uri, &ClientOptions::default()).map_err(|e| {
            BackendError::new(ProblemKind::Failed, "cannot read from the NBD server").because(e)
        })?;
        return Ok((client.clone(), Some(client)));
    }
    let path = Path::new(source);
    if !path.is_absolute() {
        // As above: it would be another file.
        let why = format!("'{source}' is neither an absolute path nor an NBD URI");
        return Err(BackendError::new(ProblemKind::Invalid, why));
    }
    whole_host(path)?;
    order.source_id.map_or(Ok(()), |id| check(path, id))?;
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
    whole_host(Path::new(name))?;
    let credentials = servers.credentials_for(name);
    stores::open_waiting(name, Access::Read, &credentials, while_busy).map_err(|e| {
        // Who refuses access, or has a certificate that is not trusted, is as good as away.
        let advice = servers.advice_for(name).filter(|_| e.kind() == StoreErrorKind::Unreachable);
        let failed = store_failed(e);
        match advice {
            Some(advice) => failed.advise(advice),
            None => failed,
        }
    })
}

/// Makes a version of it.
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
    // The same bytes: a second version would only be a second name for the first.
    options.unless_newest = true;
    options.sector_bytes = order.sector_bytes;
    options.cancel = cancel_of(control);
    let mut forward = forward(control);
    let mut progress = |progress| {
        forward(progress);
        // A server that hangs would hold the import's readers, and so its end, up.
        if let (true, Some(connection)) = (control.is_cancelled(), &connection) {
            connection.close();
        }
    };
    let imported = headwater_image::import(device, store, &options, &mut progress).map_err(image_failed)?;
    let (created, damaged_chunks) = (imported.is_new, imported.damaged_chunks);
    let remarks = imported.inspection.map_or_else(Vec::new, |found| found.remarks());
    Ok(ImportOutcome { version: made(store, name, &imported.version), created, damaged_chunks, remarks })
}

/// Refuses a path that is a file of this process to us, and was one of its own to whoever named it.
pub fn whole_host(path: &Path) -> Result<(), BackendError> {
    own_files::refuse(path).map_err(|problem| {
        BackendError::new(problem.kind, problem.message).advise(problem.advice.unwrap_or_default())
    })
}

/// A format of the API as the images know it.
pub fn file_format(format: SourceFormat) -> FileFormat {
    match format {
        SourceFormat::Raw => FileFormat::Raw,
        SourceFormat::Qcow2 => FileFormat::Qcow2,
        SourceFormat::Vhd => FileFormat::Vhd,
        SourceFormat::Vhdx => FileFormat::Vhdx,
        SourceFormat::Vmdk => FileFormat::Vmdk,
    }
}

/// Refuses a path that means another file here than to whoever named it.
fn check(path: &Path, id: FileId) -> Result<(), BackendError> {
    let refused = BackendError::new(
        ProblemKind::Invalid,
        format!("{} is not the file to the daemon that it is to who asks for the import", path.display()),
    );
    let refused = match std::fs::metadata(path) {
        Ok(found) if (found.dev(), found.ino()) == (id.device, id.inode) => return Ok(()),
        Ok(_) => refused,
        Err(e) if e.kind() == ErrorKind::PermissionDenied => {
            let user = rustix::process::geteuid().as_raw();
            let message = format!(
                "the daemon runs as user {user} and may not open {}, which another user's command has",
                path.display()
            );
            return Err(BackendError::from_io(message, e).advise(format!(
                "run the command as user {user}, as with 'sudo -u #{user}', or import a file that this user may read by its path"
            )));
        }
        Err(e) => refused.because(e),
    };
    Err(refused.advise(
        "run the command where it sees the same processes as the daemon, not in a container of its own, or import a file by a \
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
        // Where tests run there is such a file.
        for source in ["Cargo.toml", "./Cargo.toml", "nbd-disk.img"] {
            let refused = open(&order(source)).err().unwrap();
            assert_eq!(refused.kind(), ProblemKind::Invalid, "{refused}");
            assert!(refused.to_string().contains("neither an absolute path"), "{refused}");
        }
    }
}
