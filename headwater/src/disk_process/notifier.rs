//! Sends messages (ready, more time needed) to the service manager for the disk process. [`super::server`] connects it early, because the
//! sandbox forbids later connections.

use std::ffi::OsStr;
use std::io::ErrorKind;
use std::os::linux::net::SocketAddrExt;
use std::os::unix::ffi::OsStrExt;
use std::os::unix::net::{SocketAddr, UnixDatagram};

use sd_notify::NotifyState;

/// A connection to the service manager, if there is one.
pub struct Notifier(Option<UnixDatagram>);

impl Notifier {
    /// Connects to the socket that the environment names.
    pub fn connect() -> Self {
        let socket = std::env::var_os("NOTIFY_SOCKET").and_then(|name| match connect(&name) {
            Ok(socket) => Some(socket),
            Err(error) => {
                crate::show::aside(&format!("headwater: cannot reach the service manager: {error}\n"));
                None
            }
        });
        Self(socket)
    }

    /// Sends a state. Does nothing without a service manager.
    pub fn say(&self, state: &NotifyState<'_>) {
        if let Some(socket) = &self.0
            && let Err(error) = socket.send(state.to_string().as_bytes())
        {
            tracing::warn!(%error, "cannot send a state to the service manager");
        }
    }
}

fn connect(name: &OsStr) -> std::io::Result<UnixDatagram> {
    let address = match name.as_bytes() {
        [b'@', abstract_name @ ..] => SocketAddr::from_abstract_name(abstract_name)?,
        [b'/', ..] => SocketAddr::from_pathname(name)?,
        _ => return Err(ErrorKind::InvalidInput.into()),
    };
    let socket = UnixDatagram::unbound()?;
    socket.connect_addr(&address)?;
    Ok(socket)
}
