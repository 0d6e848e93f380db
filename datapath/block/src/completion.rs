//! The answer to a submitted request, which cannot be lost.

use crate::error::{IoError, IoErrorKind};

/// The result of a request, with its buffer.
///
/// The buffer is that of [`crate::Request::Read`] (filled if the read succeeded) or
/// [`crate::Request::Write`]. It is empty for requests without a buffer, and if the request was lost.
#[derive(Debug)]
pub struct Outcome {
    /// Success, or the error.
    pub result: Result<(), IoError>,
    /// The request's buffer, handed back.
    pub buffer: Vec<u8>,
}

type Callback = Box<dyn FnOnce(Outcome) + Send>;

/// The receiver of one request's answer. It is called exactly once, on any thread.
///
/// The callback must not block: it posts the answer and returns. A `Completion` that is dropped without
/// [`Completion::complete`] logs this and answers with [`IoErrorKind::Device`], so that a bug below becomes
/// an I/O error and not a hanging machine.
pub struct Completion(Option<Callback>);

impl Completion {
    /// Wraps the callback that delivers the answer.
    pub fn new(callback: impl FnOnce(Outcome) + Send + 'static) -> Self {
        Self(Some(Box::new(callback)))
    }

    /// Delivers the answer.
    pub fn complete(mut self, result: Result<(), IoError>, buffer: Vec<u8>) {
        if let Some(callback) = self.0.take() {
            callback(Outcome { result, buffer });
        }
    }
}

impl Drop for Completion {
    fn drop(&mut self) {
        if let Some(callback) = self.0.take() {
            tracing::error!("a block request was dropped without an answer; it is failed");
            let error = IoError::new(IoErrorKind::Device, "the request was dropped before it was done");
            callback(Outcome { result: Err(error), buffer: Vec::new() });
        }
    }
}

impl std::fmt::Debug for Completion {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str(if self.0.is_some() { "Completion(open)" } else { "Completion(done)" })
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::sync::mpsc;

    #[test]
    fn a_dropped_completion_answers_with_an_error() {
        let (tx, rx) = mpsc::channel();
        drop(Completion::new(move |outcome| tx.send(outcome.result.map_err(|e| e.kind())).unwrap()));
        assert_eq!(rx.recv().unwrap(), Err(IoErrorKind::Device));
    }

    #[test]
    fn a_completion_answers_once() {
        let (tx, rx) = mpsc::channel();
        Completion::new(move |outcome| tx.send(outcome.buffer).unwrap()).complete(Ok(()), vec![7]);
        assert_eq!(rx.recv().unwrap(), vec![7]);
        assert!(rx.recv().is_err());
    }
}
