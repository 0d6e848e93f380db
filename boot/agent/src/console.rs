//! Output of the agent: messages on the console until the handover to the system, and log records in the kernel log
//! (`/dev/kmsg`).

use std::fs::{File, OpenOptions};
use std::io::Write;
use std::sync::atomic::{AtomicBool, Ordering};

use tracing::{Level, Metadata};
use tracing_subscriber::fmt::MakeWriter;

static IS_OVER: AtomicBool = AtomicBool::new(false);

/// Prints a message on the console. Does nothing after [`end`].
pub(crate) fn say(text: &str) {
    if !IS_OVER.load(Ordering::Relaxed) {
        // A failed write to the console must not end the agent.
        let _ = writeln!(std::io::stderr(), "headwater: {text}");
    }
}

/// Stops output on the console: from the handover on, the console belongs to the system.
pub(crate) fn end() {
    IS_OVER.store(true, Ordering::Relaxed);
}

/// Sends the log to the kernel log, which the system's journal reads later.
pub(crate) fn log_to_kernel() {
    let file = OpenOptions::new().write(true).open("/dev/kmsg").ok();
    let subscriber = tracing_subscriber::fmt()
        .with_writer(Kernel(file))
        .with_ansi(false)
        .with_target(false)
        .with_level(false)
        .without_time();
    // It fails only if a subscriber is already installed.
    let _ = subscriber.try_init();
}

struct Kernel(Option<File>);

/// One record of the kernel log. The kernel takes a record as a single write.
struct Record<'a> {
    file: Option<&'a File>,
    text: Vec<u8>,
}

impl<'a> MakeWriter<'a> for Kernel {
    type Writer = Record<'a>;

    fn make_writer(&'a self) -> Self::Writer {
        Record { file: self.0.as_ref(), text: b"<6>headwater-agent: ".to_vec() }
    }

    fn make_writer_for(&'a self, meta: &Metadata<'_>) -> Self::Writer {
        let level = match *meta.level() {
            Level::ERROR => 3,
            Level::WARN => 4,
            _ => 6,
        };
        Record { file: self.0.as_ref(), text: format!("<{level}>headwater-agent: ").into_bytes() }
    }
}

impl Write for Record<'_> {
    fn write(&mut self, bytes: &[u8]) -> std::io::Result<usize> {
        self.text.extend(bytes);
        Ok(bytes.len())
    }

    fn flush(&mut self) -> std::io::Result<()> {
        Ok(())
    }
}

impl Drop for Record<'_> {
    fn drop(&mut self) {
        if let Some(mut file) = self.file {
            let _ = file.write_all(&self.text);
        }
    }
}
