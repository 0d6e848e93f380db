//! Reads the body of an answer as it arrives, up to a given length.
//!
//! `object_store` allocates as much memory as the answer's header announces. A server that announces too much
//! would end the process.

use bytes::Bytes;
use futures_util::StreamExt;
use futures_util::stream::BoxStream;

/// The most memory that is reserved before bytes arrive. It is more than any part of an object needs.
const ROOM_MAX_BYTES: usize = 64 << 20;

/// Reads a whole body. Returns `None` if the body is longer than `max_bytes`, and does not read it further.
pub(super) async fn read_up_to<E>(
    mut frames: BoxStream<'static, Result<Bytes, E>>,
    max_bytes: usize,
) -> Result<Option<Bytes>, E> {
    let first = frames.next().await.transpose()?.unwrap_or_default();
    if first.len() > max_bytes {
        return Ok(None);
    }
    let mut next = frames.next().await.transpose()?;
    // A small body arrives in one piece and is not copied.
    if next.is_none() {
        return Ok(Some(first));
    }
    let mut all = Vec::with_capacity(max_bytes.min(ROOM_MAX_BYTES));
    all.extend_from_slice(&first);
    while let Some(frame) = next {
        if frame.len() > max_bytes.saturating_sub(all.len()) {
            return Ok(None);
        }
        all.extend_from_slice(&frame);
        next = frames.next().await.transpose()?;
    }
    Ok(Some(Bytes::from(all)))
}

#[cfg(test)]
mod tests {
    use futures_util::FutureExt;
    use futures_util::stream::{iter, repeat};

    use super::*;

    fn read(frames: &[&'static [u8]], max_bytes: usize) -> Option<Bytes> {
        let frames: Vec<Result<Bytes, String>> =
            frames.iter().map(|&frame| Ok(Bytes::from_static(frame))).collect();
        read_up_to(iter(frames).boxed(), max_bytes).now_or_never().unwrap().unwrap()
    }

    #[test]
    fn a_body_is_read_whole_or_not_at_all() {
        assert_eq!(read(&[], 0).unwrap(), "");
        assert_eq!(read(&[b"abc"], 3).unwrap(), "abc");
        assert_eq!(read(&[b"abc", b"", b"de", b"f"], 6).unwrap(), "abcdef");
        // No memory is reserved for bytes that do not arrive.
        assert_eq!(read(&[b"abc", b"d"], usize::MAX).unwrap(), "abcd");
        assert_eq!(read(&[b"abc"], 2), None);
        assert_eq!(read(&[b"abc", b"de", b"f"], 5), None);
    }

    #[test]
    fn a_body_without_an_end_is_not_read_further() {
        let endless = repeat(Ok::<_, String>(Bytes::from_static(b"more"))).boxed();
        assert_eq!(read_up_to(endless, 1001).now_or_never().unwrap().unwrap(), None);
    }

    #[test]
    fn an_incomplete_body_is_an_error() {
        let broken = iter([Ok(Bytes::from_static(b"a")), Ok(Bytes::new()), Err("cut")]).boxed();
        assert_eq!(read_up_to(broken, 10).now_or_never().unwrap(), Err("cut"));
    }
}
