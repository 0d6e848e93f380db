//! The answer to a submitted request, which cannot be lost.

use crate::error::{IoError, IoErrorKind};

/// What became of a request: the result, and the buffer that came with it.
///
/// The buffer is the one of [`crate::Request::Read`] or [`crate::Request::Write`] (filled for a read that
/// succeeded), and empty for requests that carry none or where the request was lost.
#[derive(Debug)]
pub struct Outcome {
    /// Success, or why not.
    pub result: Result<(), IoError>,
    /// The request's buffer, handed back.
    pub buffer: Vec<u8>,
}

type Callback = Box<dyn FnOnce(Outcome) + Send>;

/// Where the answer to one request goes. Called exactly once, on any thread.
///
/// The callback must not block: it posts the answer and returns. A `Completion` that is dropped without
/// [`Completion::complete`] logs the fact and answers with [`IoErrorKind::Device`], so that a bug below
/// becomes an I/O error and never a hanging machine.
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
