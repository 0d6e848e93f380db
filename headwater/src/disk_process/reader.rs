//! Reads a frozen disk of the disk process, as a block device of the daemon: for its NBD clients, and for versions that it makes.
//! [`super::client`] creates it. It is read-only, and each frozen disk has a connection of its own.

use std::sync::Arc;
use std::sync::mpsc::{Sender, channel};

use headwater_api::ProblemKind;
use headwater_block::{
    Attempt, ByteRange, Completion, Device, Extent, Geometry, IoError, IoErrorKind, Op, Request,
};
use headwater_service::backend::BackendError;
use parking_lot::Mutex;

use super::client::Connection;
use super::protocol::{Call, PlainExtent};

/// A disk that is read over one connection, one request after the other.
pub struct RemoteDevice {
    geometry: Geometry,
    connection: Arc<Mutex<Connection>>,
    /// `None`: the thread could not be started.
    requests: Option<Sender<(Request, Completion)>>,
}

impl RemoteDevice {
    pub fn new(geometry: Geometry, connection: Arc<Mutex<Connection>>) -> Self {
        let (requests, waiting) = channel::<(Request, Completion)>();
        let reading = Arc::clone(&connection);
        let thread = std::thread::Builder::new().name("hw-disk-reader".into());
        // The thread ends when the device is dropped.
        let started = thread.spawn(move || {
            for (request, completion) in waiting {
                carry_out(&reading, request, completion);
            }
        });
        if let Err(error) = &started {
            tracing::warn!(%error, "cannot start a thread to read a disk");
        }
        Self { geometry, connection, requests: started.is_ok().then_some(requests) }
    }
}

fn carry_out(connection: &Mutex<Connection>, request: Request, completion: Completion) {
    match request {
        Request::Read { range, mut buffer } => {
            let call = Call::Read { offset: range.offset(), len: range.len() };
            let read = connection.lock().read(&call, &mut buffer).map_err(failed);
            completion.complete(read, buffer);
        }
        Request::Flush | Request::Prefetch { .. } => completion.complete(Ok(()), Vec::new()),
        other => {
            let error = IoError::new(IoErrorKind::ReadOnly, "this view of a disk cannot be written");
            completion.complete(Err(error), other.into_buffer());
        }
    }
}

fn failed(error: BackendError) -> IoError {
    let kind = match error.kind() {
        ProblemKind::Conflict => IoErrorKind::Closed,
        ProblemKind::Damaged => IoErrorKind::Corrupt,
        ProblemKind::Invalid => IoErrorKind::Invalid,
        _ => IoErrorKind::Device,
    };
    IoError::new(kind, format!("{:#}", anyhow::Error::new(error)))
}

impl Device for RemoteDevice {
    fn geometry(&self) -> Geometry {
        self.geometry
    }

    fn try_now(&self, _op: Op<'_>) -> Result<Attempt, IoError> {
        Ok(Attempt::MustWait)
    }

    fn submit(&self, request: Request, done: Completion) {
        let Some(requests) = &self.requests else {
            let error = IoError::new(IoErrorKind::Device, "there is no thread to read the disk");
            return done.complete(Err(error), request.into_buffer());
        };
        if let Err(unsent) = requests.send((request, done)) {
            let (request, done) = unsent.0;
            let error = IoError::new(IoErrorKind::Device, "the thread that reads the disk has ended");
            done.complete(Err(error), request.into_buffer());
        }
    }

    fn extents(&self, range: ByteRange, max_extents: usize) -> Result<Vec<Extent>, IoError> {
        let call = Call::Extents { offset: range.offset(), len: range.len(), max: max_extents };
        let extents: Vec<PlainExtent> = self.connection.lock().call(&call).map_err(failed)?;
        Ok(extents.into_iter().map(Extent::from).collect())
    }
}
