//! The queue of log lines: logging never blocks on a reader of the log, and never fails.

use std::fs::File;
use std::io::{self, ErrorKind, Write};
use std::sync::Arc;
use std::time::{Duration, Instant};

use anyhow::Context;
use indicatif::{ProgressBar, WeakProgressBar};
use parking_lot::{Condvar, Mutex};
use serde_json::json;
use tracing_subscriber::fmt::MakeWriter;
use tracing_subscriber::fmt::format::Writer;
use tracing_subscriber::fmt::time::{FormatTime, SystemTime};

use crate::cli::LogFormat;

/// The size of the queue while lines are being written; these may have the same size again.
const MAX_QUEUE_BYTES: usize = 1 << 20;

/// The buffer size that is kept when all lines are written.
const SPARE_BYTES: usize = 64 << 10;

/// How long a process that ends waits for its last lines.
const FLUSH_LIMIT: Duration = Duration::from_secs(1);

/// The pause before a write is retried if the output was made non-blocking by another process.
const RETRY_AFTER: Duration = Duration::from_millis(20);

/// Lines in the order of logging. A thread writes them. Lines that do not fit are dropped, and a later line reports
/// that.
#[derive(Clone)]
pub struct LogQueue(Arc<Shared>);

struct Shared {
    queue: Mutex<Queue>,
    /// Notified when there are lines to write.
    more: Condvar,
    /// Notified when all lines are written, or could not be.
    written: Condvar,
    format: LogFormat,
    /// The latest progress bar on the same output, if it still exists.
    bar: Mutex<WeakProgressBar>,
}

#[derive(Default)]
struct Queue {
    text: Vec<u8>,
    lost_lines: u64,
    is_writing: bool,
}

impl LogQueue {
    /// Starts the thread that writes to `output`.
    pub fn start(output: File, format: LogFormat) -> anyhow::Result<Self> {
        let shared = Shared {
            queue: Mutex::default(),
            more: Condvar::new(),
            written: Condvar::new(),
            format,
            bar: Mutex::default(),
        };
        let shared = Arc::new(shared);
        let theirs = Arc::clone(&shared);
        let thread = std::thread::Builder::new().name("log".into());
        thread
            .spawn(move || theirs.write_all(output))
            .context("cannot start the thread that writes the log")?;
        Ok(Self(shared))
    }

    /// Adds a line, which ends with a line feed.
    pub fn push(&self, line: &[u8]) {
        let mut queue = self.0.queue.lock();
        if queue.text.len().saturating_add(line.len()) > MAX_QUEUE_BYTES {
            queue.lost_lines += 1;
            return;
        }
        queue.text.extend_from_slice(line);
        drop(queue);
        self.0.more.notify_one();
    }

    /// Adds a line about the process itself, independent of the log's filter.
    pub fn note(&self, level: &str, message: &str) {
        self.push(&self.0.line(level, message));
    }

    /// Hides this bar while lines are written to its terminal, because they would otherwise begin in the middle of
    /// the bar, and be overwritten by it.
    pub fn keep_clear_of(&self, bar: &ProgressBar) {
        *self.0.bar.lock() = bar.downgrade();
    }

    /// Waits until all lines are written, with a timeout.
    pub fn flush(&self) {
        let deadline = Instant::now() + FLUSH_LIMIT;
        let mut queue = self.0.queue.lock();
        while queue.is_writing || !queue.text.is_empty() {
            if self.0.written.wait_until(&mut queue, deadline).timed_out() {
                return;
            }
        }
    }

    /// Waits without a timeout until all lines are written, or could not be.
    pub fn drain(&self) {
        let mut queue = self.0.queue.lock();
        while queue.is_writing || !queue.text.is_empty() {
            self.0.written.wait(&mut queue);
        }
    }
}

/// Each write is one line, as the formatter does it.
impl Write for &LogQueue {
    fn write(&mut self, line: &[u8]) -> io::Result<usize> {
        self.push(line);
        Ok(line.len())
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}

impl<'a> MakeWriter<'a> for LogQueue {
    type Writer = &'a Self;

    fn make_writer(&'a self) -> Self::Writer {
        self
    }
}

impl Shared {
    fn write_all(&self, mut output: File) {
        let mut batch = Vec::new();
        let mut lost_lines = 0;
        loop {
            batch.clear();
            batch.shrink_to(SPARE_BYTES);
            let mut queue = self.queue.lock();
            queue.is_writing = false;
            self.written.notify_all();
            while queue.text.is_empty() {
                self.more.wait(&mut queue);
            }
            queue.is_writing = true;
            std::mem::swap(&mut queue.text, &mut batch);
            lost_lines += std::mem::take(&mut queue.lost_lines);
            drop(queue);
            let noted = lost_lines;
            if noted > 0 {
                let message = format!(
                    "{noted} lines of this log are lost, because they could not be written fast enough"
                );
                batch.extend_from_slice(&self.line("WARN", &message));
            }
            let bar = self.bar.lock().upgrade();
            let rest = match bar {
                // The thread that draws the bar waits meanwhile, as for the same terminal.
                Some(bar) => bar.suspend(|| write(&mut output, &batch)),
                None => write(&mut output, &batch),
            };
            let unwritten = rest.iter().filter(|byte| **byte == b'\n').count();
            // The last line is the note: if it could not be written, the lost lines that it reports stay counted.
            lost_lines = match u64::try_from(unwritten).unwrap_or(u64::MAX) {
                0 => 0,
                lines if noted > 0 => lines - 1 + noted,
                lines => lines,
            };
        }
    }

    /// Formats a line like the formatter.
    fn line(&self, level: &str, message: &str) -> Vec<u8> {
        let mut time = String::new();
        // If the time cannot be formatted, it is left out.
        let _ = SystemTime.format_time(&mut Writer::new(&mut time));
        let target = module_path!();
        let line = match self.format {
            LogFormat::Text => format!("{time} {level:>5} {target}: {message}\n"),
            LogFormat::Json => {
                let fields = json!({ "message": message });
                let line = json!({ "timestamp": time, "level": level, "fields": fields, "target": target });
                format!("{line}\n")
            }
        };
        line.into_bytes()
    }
}

/// Writes bytes, and returns those that could not be written.
fn write<'a>(output: &mut File, mut bytes: &'a [u8]) -> &'a [u8] {
    while !bytes.is_empty() {
        match output.write(bytes) {
            Ok(0) => break,
            Ok(n) => bytes = bytes.get(n..).unwrap_or_default(),
            Err(e) if e.kind() == ErrorKind::Interrupted => {}
            Err(e) if e.kind() == ErrorKind::WouldBlock => std::thread::sleep(RETRY_AFTER),
            // An error of the log cannot be reported anywhere.
            Err(_) => break,
        }
    }
    bytes
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::io::Read;
    use std::os::fd::OwnedFd;

    #[test]
    fn lines_are_written_in_order_and_a_later_one_says_how_many_were_lost() {
        let (mut reader, writer) = io::pipe().unwrap();
        let log = LogQueue::start(File::from(OwnedFd::from(writer)), LogFormat::Text).unwrap();
        // Nobody reads: the pipe, the batch that is being written, and the queue fill up.
        let lines = 40_000;
        for number in 0..lines {
            log.push(format!("line {number:0100}\n").as_bytes());
        }
        let read = std::thread::spawn(move || {
            let (mut text, mut piece) = (Vec::new(), vec![0; 64 << 10]);
            while !String::from_utf8_lossy(&text).contains("the end") {
                let n = reader.read(&mut piece).unwrap();
                assert!(n > 0);
                text.extend_from_slice(&piece[..n]);
            }
            String::from_utf8(text).unwrap()
        });
        // After there is space again.
        while !log.0.queue.lock().text.is_empty() {
            std::thread::yield_now();
        }
        log.push(b"the end\n");
        let text = read.join().unwrap();
        let (numbered, others): (Vec<&str>, Vec<&str>) =
            text.lines().partition(|line| line.starts_with("line "));
        let numbers: Vec<u64> = numbered.iter().map(|line| line["line ".len()..].parse().unwrap()).collect();
        assert!(numbers.is_sorted() && numbers.len() > MAX_QUEUE_BYTES / 110, "{}", numbers.len());
        let (end, notes) = others.split_last().unwrap();
        assert_eq!(*end, "the end");
        let lost = |note: &&str| -> usize {
            let (_, text) = note.split_once(" WARN headwater::logging::queue: ").unwrap();
            text.strip_suffix(" lines of this log are lost, because they could not be written fast enough")
                .unwrap()
                .parse()
                .unwrap()
        };
        assert!(!notes.is_empty());
        assert_eq!(notes.iter().map(lost).sum::<usize>(), lines - numbers.len());
    }

    #[test]
    fn a_line_waits_for_a_bar_that_is_being_drawn_and_for_none_that_is_over() {
        let (mut reader, writer) = io::pipe().unwrap();
        rustix::io::ioctl_fionbio(&reader, true).unwrap();
        let log = LogQueue::start(File::from(OwnedFd::from(writer)), LogFormat::Text).unwrap();
        let bar = ProgressBar::hidden();
        log.keep_clear_of(&bar);
        let mut read = || {
            let mut piece = [0; 16];
            match reader.read(&mut piece) {
                Ok(n) => String::from_utf8_lossy(&piece[..n]).into_owned(),
                Err(e) if e.kind() == ErrorKind::WouldBlock => String::new(),
                Err(e) => panic!("{e}"),
            }
        };
        // As while the bar is drawn. The log has the full timeout of a flush.
        bar.suspend(|| {
            log.push(b"one\n");
            log.flush();
            assert_eq!(read(), "");
        });
        headwater_testkit::wait_until("it is written once the bar is drawn", || read() == "one\n");
        drop(bar);
        log.push(b"two\n");
        headwater_testkit::wait_until("it is written where there is no bar", || read() == "two\n");
    }

    #[test]
    fn whoever_drains_the_log_waits_for_its_reader_and_whoever_flushes_it_does_not() {
        let (mut reader, writer) = io::pipe().unwrap();
        let log = LogQueue::start(File::from(OwnedFd::from(writer)), LogFormat::Text).unwrap();
        // More than the size of a pipe.
        let mut line = vec![b'.'; 512 << 10];
        line.push(b'\n');
        log.push(&line);
        let (tell, told) = std::sync::mpsc::channel();
        let draining = log.clone();
        let drained = std::thread::spawn(move || {
            draining.drain();
            tell.send(()).unwrap();
        });
        // The reader has the full timeout of a flush.
        log.flush();
        assert!(told.try_recv().is_err(), "nobody has read it");
        let mut read = vec![0; line.len()];
        reader.read_exact(&mut read).unwrap();
        assert!(read == line);
        drained.join().unwrap();
        told.recv().unwrap();
    }

    #[test]
    fn a_log_that_cannot_be_written_holds_nobody_up() {
        let full = File::options().write(true).open("/dev/full").unwrap();
        let rest = write(&mut { full }, b"one\ntwo\n");
        assert_eq!(rest, b"one\ntwo\n");
        let full = File::options().write(true).open("/dev/full").unwrap();
        let log = LogQueue::start(full, LogFormat::Json).unwrap();
        log.push(b"one\n");
        log.flush();
        log.note("ERROR", "two");
        headwater_testkit::wait_until("both are given up", || {
            log.flush();
            log.0.queue.lock().text.is_empty()
        });
        let line: serde_json::Value = serde_json::from_slice(&log.0.line("ERROR", "a \"b\"\nc")).unwrap();
        assert_eq!((&line["level"], &line["fields"]["message"]), (&json!("ERROR"), &json!("a \"b\"\nc")));
    }
}
