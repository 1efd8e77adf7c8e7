//! Bodies that are read up to a limit, and bodies that are given on.
//!
//! What was read and turned out to be longer than the limit is not lost: what is there goes first, the rest follows as it
//! comes. Trailers of what was read whole are dropped.

use std::fmt;
use std::future::poll_fn;
use std::pin::Pin;
use std::task::{Context, Poll};

use bytes::{Bytes, BytesMut};
use http_body::{Body as HttpBody, Frame, SizeHint};

/// The body of a request that comes out of the layer, or of a response: in memory, or `B` as it was.
pub struct Body<B> {
    /// Goes first.
    head: Option<Bytes>,
    rest: Option<Pin<Box<B>>>,
}

impl<B> Body<B> {
    pub(super) fn whole(bytes: Bytes) -> Self {
        Self { head: Some(bytes).filter(|bytes| !bytes.is_empty()), rest: None }
    }

    pub(super) fn untouched(body: B) -> Self {
        Self { head: None, rest: Some(Box::pin(body)) }
    }

    fn broken_off(head: Bytes, rest: Pin<Box<B>>) -> Self {
        Self { head: Some(head).filter(|head| !head.is_empty()), rest: Some(rest) }
    }
}

impl<B> fmt::Debug for Body<B> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let head = self.head.as_ref().map_or(0, Bytes::len);
        f.debug_struct("Body").field("bytes", &head).field("is_all", &self.rest.is_none()).finish()
    }
}

impl<B: HttpBody<Data = Bytes>> HttpBody for Body<B> {
    type Data = Bytes;
    type Error = B::Error;

    fn poll_frame(
        mut self: Pin<&mut Self>,
        context: &mut Context<'_>,
    ) -> Poll<Option<Result<Frame<Bytes>, B::Error>>> {
        if let Some(head) = self.head.take() {
            return Poll::Ready(Some(Ok(Frame::data(head))));
        }
        match &mut self.rest {
            Some(rest) => rest.as_mut().poll_frame(context),
            None => Poll::Ready(None),
        }
    }

    fn is_end_stream(&self) -> bool {
        self.head.is_none() && self.rest.as_ref().is_none_or(|rest| rest.is_end_stream())
    }

    fn size_hint(&self) -> SizeHint {
        let head = self.head.as_ref().map_or(0, |head| u64::try_from(head.len()).unwrap_or(u64::MAX));
        let mut hint = self.rest.as_ref().map_or_else(|| SizeHint::with_exact(0), |rest| rest.size_hint());
        if let Some(upper) = hint.upper() {
            hint.set_upper(upper.saturating_add(head));
        }
        hint.set_lower(hint.lower().saturating_add(head));
        hint
    }
}

/// What was read.
pub(super) enum Read<B> {
    Whole(Bytes),
    /// It is longer than the limit. All of it, still.
    TooLong(Body<B>),
}

/// Reads a body that is not longer than `limit` bytes. Of a longer one it holds at most the limit and one frame; of one
/// that says how long it is, nothing.
pub(super) async fn read<B: HttpBody<Data = Bytes>>(body: B, limit: usize) -> Result<Read<B>, B::Error> {
    let limit_u64 = u64::try_from(limit).unwrap_or(u64::MAX);
    if body.size_hint().lower() > limit_u64 {
        return Ok(Read::TooLong(Body::untouched(body)));
    }
    let mut body = Box::pin(body);
    let mut head = BytesMut::new();
    while let Some(frame) = poll_fn(|context| body.as_mut().poll_frame(context)).await {
        let Ok(data) = frame?.into_data() else { continue };
        head.extend_from_slice(&data);
        if head.len() > limit {
            return Ok(Read::TooLong(Body::broken_off(head.freeze(), body)));
        }
    }
    Ok(Read::Whole(head.freeze()))
}

#[cfg(test)]
mod tests {
    use std::collections::VecDeque;
    use std::convert::Infallible;

    use futures_util::FutureExt;
    use proptest::prelude::*;

    use super::*;

    /// Comes in pieces, and does not say how long it is.
    struct Pieces(VecDeque<Vec<u8>>);

    impl HttpBody for Pieces {
        type Data = Bytes;
        type Error = Infallible;

        fn poll_frame(
            mut self: Pin<&mut Self>,
            _: &mut Context<'_>,
        ) -> Poll<Option<Result<Frame<Bytes>, Infallible>>> {
            Poll::Ready(self.0.pop_front().map(|piece| Ok(Frame::data(piece.into()))))
        }
    }

    fn all_of<B: HttpBody<Data = Bytes, Error = Infallible>>(body: B) -> Vec<u8> {
        match read(body, usize::MAX).now_or_never() {
            Some(Ok(Read::Whole(bytes))) => bytes.into(),
            _ => panic!("it is whole"),
        }
    }

    proptest! {
        #[test]
        fn a_limit_is_kept_and_nothing_is_lost_on_either_side_of_it(
            pieces in prop::collection::vec(prop::collection::vec(any::<u8>(), 0..20), 0..8),
            limit in 0_usize..100,
        ) {
            let whole = pieces.concat();
            let longest = pieces.iter().map(Vec::len).max().unwrap_or(0);
            match read(Pieces(pieces.into()), limit).now_or_never() {
                Some(Ok(Read::Whole(bytes))) => {
                    prop_assert!(whole.len() <= limit);
                    prop_assert_eq!(bytes, whole);
                }
                Some(Ok(Read::TooLong(body))) => {
                    prop_assert!(whole.len() > limit);
                    prop_assert!(body.size_hint().lower() <= u64::try_from(limit + longest).unwrap());
                    prop_assert_eq!(all_of(body), whole);
                }
                _ => prop_assert!(false, "it is there at once"),
            }
        }
    }

    #[test]
    fn a_body_that_says_that_it_is_too_long_is_not_read() {
        let body = Body::<Pieces>::whole(Bytes::from_static(b"twelve bytes"));
        assert_eq!(body.size_hint().exact(), Some(12));
        let Some(Ok(Read::TooLong(body))) = read(body, 11).now_or_never() else { panic!("it is too long") };
        assert!(body.head.is_none(), "nothing was taken out of it");
        assert_eq!(all_of(body), b"twelve bytes");
        assert!(Body::<Pieces>::whole(Bytes::new()).is_end_stream());
    }
}
