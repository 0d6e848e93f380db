//! What is imported: files, and what NBD servers serve.

use std::io::ErrorKind;
use std::os::unix::fs::MetadataExt;
use std::path::Path;
use std::sync::Arc;

use headwater_api::{FileId, ProblemKind, SourceFormat};
use headwater_block::Device;
use headwater_image::{Backing, FileFormat};
use headwater_nbd::client::ClientOptions;
use headwater_nbd::{Client, NbdUri};
use headwater_service::backend::{BackendError, ImportOrder};

use crate::adapters::images::image_failed;
use crate::own_files;

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
    whole_host(path)?;
    order.source_id.map_or(Ok(()), |id| check(path, id))?;
    let backing = if order.backing { Backing::Anywhere } else { Backing::Beside };
    let format = order.format.map(file_format);
    let file = headwater_image::open_source_backed(path, format, backing).map_err(image_failed)?;
    Ok((file, None))
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
